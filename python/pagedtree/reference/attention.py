"""Attention over a paged cache, and merging of its parts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedtree.bits import unpacked

__all__ = ["merge_states", "tree_attention", "visible_keys"]


def visible_keys(seq_len: int, n: int, tree_len: int, words: Tensor | None, window: int) -> Tensor:
    """Returns bool [n, seq_len], the keys visible to n queries; words int32 [n, W], causal if tree_len < 0."""
    mask = np.zeros((n, seq_len), dtype=bool)
    tree_start = seq_len - tree_len
    for i in range(n):
        if words is None or tree_len < 0:
            position = seq_len - n + i
            first = max(0, position - window + 1) if window else 0
            mask[i, first : max(position + 1, 0)] = True
            continue
        bits = np.flatnonzero(unpacked(words[i], tree_len))
        position = tree_start + len(bits) - 1
        mask[i, :tree_start] = True
        if window:
            mask[i, : max(position - window + 1, 0)] = False
        for depth, j in enumerate(bits):
            mask[i, tree_start + j] = not window or position - (tree_start + depth) < window
    return torch.from_numpy(mask)


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    is_view = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride()[:2] == v_cache.stride()[:2]
    return is_view and k_cache.shape[2] == 1


def _rows_of(cache: Tensor, page_ids: Tensor, is_read: Tensor) -> Tensor:
    """Returns a sequence's rows in float64, 0 where none is read or its page is outside the pool."""
    num_pages, page_size, num_heads, head_dim = cache.shape
    positions = torch.nonzero(is_read).flatten()
    pages = page_ids.long()[positions // page_size]
    has_page = (pages >= 0) & (pages < num_pages)
    rows = cache[pages[has_page], positions[has_page] % page_size].float().double()
    return torch.zeros(len(is_read), num_heads, head_dim, dtype=torch.float64).index_put((positions[has_page],), rows)


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    tree_mask: Tensor | None = None, *, tree_lens: Tensor | None = None, scale: float | None = None,
    softcap: float = 0.0, window: int = 0, sinks: Tensor | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (out, lse) of `pagedtree.tree_attention` in float64, clamping of bad values included."""
    num_tokens, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, head_dim_v = v_cache.shape
    group = num_heads // num_kv_heads
    out = torch.zeros(num_tokens, num_heads, head_dim_v, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64)
    sink = torch.full((num_heads,), -torch.inf, dtype=torch.float32) if sinks is None else sinks
    k_factor = torch.ones(num_kv_heads, dtype=torch.float32) if k_scale is None else k_scale.expand(num_kv_heads)
    if v_scale is None and is_latent(k_cache, v_cache):
        v_scale = k_scale
    v_factor = torch.ones(num_kv_heads, dtype=torch.float32) if v_scale is None else v_scale.expand(num_kv_heads)
    offsets = cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        begin, n = offsets[b], offsets[b + 1] - offsets[b]
        seq_len = min(max(length, 0), page_table.shape[1] * page_size)
        tree_len = n if tree_lens is None else min(max(int(tree_lens[b]), -1), seq_len)
        words = None if tree_mask is None else tree_mask[begin : begin + n]
        visibility = visible_keys(seq_len, n, min(tree_len, seq_len), words, window)
        has_query = visibility.any(0)
        k, v = (_rows_of(cache, page_table[b], has_query) for cache in (k_cache, v_cache))
        k, v = k * k_factor.double()[:, None], v * v_factor.double()[:, None]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + n].double(), k)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visibility, -torch.inf)
        logits = torch.cat([scores, sink.double()[:, None, None].expand(-1, n, 1)], -1)
        total = logits.logsumexp(-1)
        weights = (scores - total.masked_fill(total == -torch.inf, 0)[..., None]).exp()
        is_finite = v.isfinite().all(2).all(1)
        of_rows = torch.einsum("hqk,khd->qhd", weights[..., is_finite], v[is_finite])
        for key in torch.nonzero(~is_finite).flatten().tolist():  # which the others must not multiply by 0
            rows = visibility[:, key]
            of_rows[rows] += weights[:, rows, key].T[..., None] * v[key]
        out[begin : begin + n] = of_rows
        lse[begin : begin + n] = total.T
    return out, lse


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    base = lse.masked_fill(lse == -torch.inf, 0)
    sides = ((out_a, lse_a), (out_b, lse_b))
    out = sum((lse_x.double() - base).exp()[..., None] * out_x.double().nan_to_num() for out_x, lse_x in sides)
    return torch.as_tensor(out), lse
