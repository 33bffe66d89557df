"""FlashAttention's two functions for inference, on pagedtree. Nothing of flash-attn is needed.

Causal masks are aligned to the last key, as in FlashAttention; a row that sees no key gives 0 and lse -inf. What is not
supported is refused by name, with NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedtree import append_kv, slot_mapping, tree_attention
from pagedtree._arguments import checked, expect_dims
from pagedtree.integrations.indices import INT32_MAX, as_int32
from pagedtree.integrations.masks import all_visible, pack_intervals

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]


@checked(integers=("cache_seqlens", "cache_batch_idx", "block_table"))
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of n queries per sequence over a cache, to which k and v are appended first.

    Args:
        q: [B, n, H, D].
        k_cache, v_cache: [sequences, S, Hkv, D], or pages [pages, page_size, Hkv, D] with a block_table; any page
            size. Written if k and v are given. Strided views are not copied. V may have another width Dv, in the pairs
            that `tree_attention` takes; a view of K's first columns makes the call latent there.
        k, v: [B, m, Hkv, D] and [B, m, Hkv, Dv], for positions cache_seqlens onwards. They go with cache_seqlens; what
            does not fit into the cache is skipped.
        cache_seqlens: int or int32 [B], keys before k; default the whole cache.
        cache_batch_idx: int32 [B], the sequence of the cache for each of q, without a block_table.
        block_table: int32 [B, max_pages].
        softmax_scale: default D ** -0.5. softcap: > 0 caps scores with tanh.
        causal: query i sees keys up to cache_seqlens + m - n + i; else all.
        window_size: (left, right), how many keys before and behind its own a query sees; negative: all. If causal,
            right is 0.
        num_splits, rotary_interleaved: no effect.
        return_softmax_lse: also return lse, fp32 [B, H, n].

    Returns out [B, n, H, Dv]. Refused unless None: rotary_cos, rotary_sin, cache_leftpad, alibi_slopes. Raises
    NotImplementedError for these, ValueError for wrong shapes or dtypes. Windows that are not causal make a mask of a
    bit per query and position of the cache.
    """
    _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes)
    expect_dims("[batch, queries, heads, dim]", q=q)
    expect_dims("[batch or pages, tokens, heads, dim]", k_cache=k_cache, v_cache=v_cache)
    expect_dims("[batch, max_pages]", block_table=block_table)
    (batch, n, heads, _), page_size, device = q.shape, k_cache.shape[1], q.device
    if block_table is None:  # a page is a sequence
        rows = torch.arange(batch, dtype=torch.int32, device=device) if cache_batch_idx is None else cache_batch_idx
        block_table = as_int32(rows)[:, None]
    elif cache_batch_idx is not None:
        raise ValueError("cache_batch_idx: expected None with a block_table, got a tensor")
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * page_size
        if k is not None:
            raise ValueError("cache_seqlens: expected lengths where k is given, got None")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), min(max(cache_seqlens, -1), INT32_MAX), dtype=torch.int32, device=device)
    seq_lens = as_int32(cache_seqlens)
    if (k is None) != (v is None):
        raise ValueError(f"v: expected {'None, as k' if k is None else 'a tensor, as k'}")
    if k is not None and v is not None:
        for name, new in (("k", k), ("v", v)):
            if new.dim() != 4 or new.shape[0] != batch:
                raise ValueError(f"{name}: expected [{batch}, new, heads, dim], got shape {[*new.shape]}")
        seq_lens = seq_lens + k.shape[1]
        slots = slot_mapping(
            block_table, seq_lens, _offsets(batch, k.shape[1], device), page_size, total_q=batch * k.shape[1]
        )
        append_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots)
    offsets, capacity = _offsets(batch, n, device), block_table.shape[1] * page_size
    out, lse = tree_attention(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        offsets,
        max_seqlen_q=max(n, 1),
        scale=softmax_scale,
        softcap=softcap,
        **_visibility(batch * n, offsets, seq_lens, capacity, causal, window_size),
        return_lse=True,
    )
    out = out.view(batch, n, heads, v_cache.shape[-1])
    return (out, lse.view(batch, n, heads).transpose(1, 2).contiguous()) if return_softmax_lse else out


@checked(integers=("cu_seqlens_q", "cu_seqlens_k", "block_table"))
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attention of a ragged batch; forward only.

    Args:
        q: [T, H, D]; cu_seqlens_q, cu_seqlens_k: int32 [B + 1], offsets of queries and keys.
        k, v: [keys, Hkv, D], or pages [pages, page_size, Hkv, D] with a block_table int32 [B, max_pages]. Rows are read
            where they are. V may have another width Dv, as for `flash_attn_with_kvcache`.
        max_seqlen_q: a hint; max_seqlen_k: at least the most keys of a sequence, without a block_table.
        softmax_scale, causal, window_size, softcap: as for `flash_attn_with_kvcache`.
        deterministic: no effect, results always repeat bit by bit.

    Returns out [T, H, Dv]. Refused with NotImplementedError: dropout_p other than 0, alibi_slopes, return_attn_probs,
    and gradients. Raises ValueError for wrong shapes or dtypes.
    """
    _refuse(dropout_p=dropout_p or None, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs or None)
    if torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.requires_grad:
                raise NotImplementedError(f"{name}: expected a tensor without requires_grad (there is no backward)")
    expect_dims("[keys, heads, dim]" if block_table is None else "[pages, page_size, heads, dim]", k=k, v=v)
    expect_dims("[B + 1]", cu_seqlens_k=cu_seqlens_k)
    expect_dims("[B, max_pages]", block_table=block_table)
    seq_lens = cu_seqlens_k.diff().int()
    if block_table is None:  # pages of one row, each where it is
        max_seqlen_k = max(min(max_seqlen_k, k.shape[0]), 0)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        block_table = (cu_seqlens_k[:-1, None] + torch.arange(max_seqlen_k, device=q.device)).int()
    out = tree_attention(
        q,
        k,
        v,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q=max(max_seqlen_q, 1),
        scale=softmax_scale,
        softcap=softcap,
        **_visibility(q.shape[0], cu_seqlens_q, seq_lens, block_table.shape[1] * k.shape[1], causal, window_size),
    )
    assert isinstance(out, Tensor)
    return out


def _offsets(batch: int, each: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * each


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}: not supported; expected its default, got {got}")


def _visibility(
    num_queries: int, cu_seqlens_q: Tensor, seq_lens: Tensor, max_keys: int, causal: bool, window_size: tuple[int, int]
) -> dict[str, Any]:
    """The arguments of `tree_attention` for FlashAttention's causal and window_size."""
    left, right = window_size
    if causal or right == 0:  # FlashAttention takes these for the same, too
        return {"window": max(left, -1) + 1}
    if left < 0 and right < 0:
        return all_visible(num_queries, seq_lens)
    left, right = (num_queries + max_keys if side < 0 else side for side in window_size)
    query = torch.arange(num_queries, dtype=cu_seqlens_q.dtype, device=seq_lens.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:], query, right=True)
    lens = seq_lens.clamp(max=max_keys)
    own_key = query + torch.nn.functional.pad(lens - cu_seqlens_q[1:], (0, 1))[sequence]  # the last query's is last
    return {"tree_mask": pack_intervals(own_key - left, own_key + right + 1, max_keys), "tree_lens": lens}
