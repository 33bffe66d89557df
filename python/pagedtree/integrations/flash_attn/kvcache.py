"""FlashAttention's `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedtree import append_kv, rope_append, slot_mapping, tree_attention
from pagedtree._arguments import checked, expect_dims, expect_shape, refusal
from pagedtree.integrations.flash_attn.arguments import (
    even_offsets,
    one_of,
    refuse,
    rows_in_sequences,
    scale_of,
    visibility,
)
from pagedtree.integrations.indices import INT32_MAX, as_int32

INTEGERS = ("cache_seqlens", "cache_batch_idx", "block_table", "page_table", "cu_seqlens_q", "cu_seqlens_k_new")


@checked(integers=(*INTEGERS, "rotary_seqlens"))
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attends n queries per sequence to a cache, after appending k and v to it.

    Args:
        q: [B, n, H, D], or ragged [T, H, D] with cu_seqlens_q int32 [B + 1].
        k_cache, v_cache: [sequences, S, Hkv, D], or pages [pages, page_size, Hkv, D] with a block_table; written if k
            and v are given. V may have another width Dv, in the pairs that `tree_attention` takes, or be a view of K's
            first columns (latent).
        k, v: [B, m, Hkv, D] and [B, m, Hkv, Dv], or ragged [new, Hkv, ...] with cu_seqlens_k_new int32 [B + 1], for
            positions cache_seqlens onwards, which they need; tokens past the end of the cache are skipped.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], with k: k and q are rotated first (`rope_append`), k[:, j]
            by position cache_seqlens + j, q[:, i] by cache_seqlens + i if causal or in a window, else by cache_seqlens;
            rotary_seqlens, int32 [B], replaces these. rotary_interleaved: rotates neighbours, else the two halves.
        cache_seqlens: int or int32 [B], keys before k; default the whole cache. cache_batch_idx: int32 [B], the cache
            sequence of each of q's. block_table, page_table: int32 [B, max_pages], two names of one argument.
        softmax_scale: default D ** -0.5. softcap: > 0 caps scores with tanh.
        causal: query i sees keys up to cache_seqlens + m - n + i; else all. window_size: (left, right), keys before and
            after its own that a query sees; negative: all. If causal, right is 0.
        k_descale, v_descale: fp32 scalar, [Hkv], or [B, Hkv] expanded from that: factors of an fp8 cache.
        max_seqlen_q, num_splits, scheduler_metadata, pack_gqa, sm_margin: hints, no effect on the result.
        return_softmax_lse: also return lse, fp32 [B, H, n], or [H, T] where q is ragged.

    Arguments after return_softmax_lse are FlashAttention 3's. Returns out in q's form, with Dv columns. Raises
    NotImplementedError for cache_leftpad, alibi_slopes, qv, q_descale and attention_chunk other than their defaults,
    ValueError for wrong shapes or dtypes. Windows that are not causal make a mask of a bit per query and position.
    """
    refuse(cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes, qv=qv)
    refuse(q_descale=q_descale, attention_chunk=attention_chunk)
    block_table = one_of(block_table=block_table, page_table=page_table)
    expect_dims("[batch, queries, heads, dim]" if cu_seqlens_q is None else "[queries, heads, dim]", q=q)
    expect_dims("[batch or pages, tokens, heads, dim]", k_cache=k_cache, v_cache=v_cache)
    expect_dims("[batch, max_pages]", block_table=block_table)
    expect_dims("[batch + 1]", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
    device, page_size = q.device, k_cache.shape[1]
    batch = q.shape[0] if cu_seqlens_q is None else max(cu_seqlens_q.numel() - 1, 0)
    rows = q if cu_seqlens_q is not None else q.flatten(0, 1)
    offsets = even_offsets(batch, q.shape[1], device) if cu_seqlens_q is None else cu_seqlens_q.int()
    longest = max_seqlen_q if cu_seqlens_q is not None else q.shape[1]
    if block_table is None:  # a page is a sequence
        index = torch.arange(batch, dtype=torch.int32, device=device) if cache_batch_idx is None else cache_batch_idx
        block_table = as_int32(index)[:, None]
    elif cache_batch_idx is not None:
        raise refusal("cache_batch_idx", "None with a block_table", "a tensor")
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * page_size
        if k is not None:
            raise refusal("cache_seqlens", "lengths where k is given", "None")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), min(max(cache_seqlens, -1), INT32_MAX), dtype=torch.int32, device=device)
    expect_shape([batch], cache_seqlens=cache_seqlens)
    seq_lens = as_int32(cache_seqlens)
    if (k is None) != (v is None):
        raise refusal("v", "None, as k" if k is None else "a tensor, as k")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise refusal("rotary_cos", "rotary_sin and k with it", "only a part of them")
    scales: dict[str, Any] = {"k_scale": scale_of("k_descale", k_descale), "v_scale": scale_of("v_descale", v_descale)}
    if k is not None and v is not None:
        rotary: dict[str, Any] = {"interleaved": rotary_interleaved}
        if rotary_cos is not None and rotary_sin is not None and batch > 0:
            rotary["cos_sin"] = torch.cat([rotary_cos, rotary_sin], -1)
        starts = seq_lens if rotary_seqlens is None else as_int32(rotary_seqlens)
        is_per_row, is_even = causal or max(window_size) >= 0, cu_seqlens_q is None and cu_seqlens_k_new is None
        cache, rotated = (k_cache, v_cache, block_table), (rows, offsets, starts, is_per_row, is_even)
        rows, seq_lens = _append(k, v, cu_seqlens_k_new, cache, seq_lens, rotated, rotary, scales)
    sees = visibility(rows.shape[0], offsets, seq_lens, block_table.shape[1] * page_size, causal, window_size)
    how = {"max_seqlen_q": None if longest is None else max(longest, 1), "scale": softmax_scale, "softcap": softcap}
    call = sees | how | scales
    out, lse = tree_attention(rows, k_cache, v_cache, block_table, seq_lens, offsets, **call, return_lse=True)
    out = out.view(*q.shape[:-1], v_cache.shape[-1])
    if not return_softmax_lse:
        return out
    return out, (lse if cu_seqlens_q is not None else lse.view(*q.shape[:-1])).transpose(-1, -2).contiguous()


def _append(
    k: Tensor, v: Tensor, new_offsets: Tensor | None, cache: tuple[Tensor, Tensor, Tensor], seq_lens: Tensor,
    rotated: tuple[Tensor, Tensor, Tensor, bool, bool], rotary: dict[str, Any], scales: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Appends k and v; rotates them and the queries if `rotary` has angles. Returns queries and new lengths.

    rotated: queries, offsets, first positions, is_per_row, is_even (one query a new key).
    """
    (k_cache, v_cache, block_table), batch = cache, seq_lens.shape[0]
    rows, offsets, starts, is_per_row, is_even = rotated
    form = "[batch, new, heads, dim]" if new_offsets is None else "[new, heads, dim]"
    for name, new in (("k", k), ("v", v)):
        if new_offsets is None and (new.dim() != 4 or new.shape[0] != batch):
            raise refusal(name, f"[{batch}, new, heads, dim]", f"shape {[*new.shape]}")
        expect_dims(form, **{name: new})
    if new_offsets is None:
        new_offsets = even_offsets(batch, k.shape[1], k.device)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    elif new_offsets.numel() != batch + 1:
        raise refusal("cu_seqlens_k_new", f"shape [{batch + 1}]", [*new_offsets.shape])
    seq_lens = seq_lens + new_offsets.diff().int()
    slots = slot_mapping(block_table, seq_lens, new_offsets.int(), k_cache.shape[1], total_q=k.shape[0])
    converted = scales if k.dtype != k_cache.dtype else {}
    if "cos_sin" not in rotary:
        append_kv(k, v, k_cache, v_cache, slots, **converted)
        return rows, seq_lens
    rotary["k_cache"] = k_cache
    positions = _positions(starts, new_offsets, k.shape[0], True)
    if is_per_row and is_even and len(rows) == len(k):
        return rope_append(rows, k, v, positions, v_cache=v_cache, slots=slots, **rotary, **converted), seq_lens
    rope_append(k, k, v, positions, v_cache=v_cache, slots=slots, **rotary, **converted)
    positions = _positions(starts, offsets, rows.shape[0], is_per_row)
    keys = rows[:, : k_cache.shape[2]]  # of no meaning: no slot takes them
    no_slots = torch.full_like(positions, -1)
    return rope_append(rows, keys, None, positions, v_cache=None, slots=no_slots, **rotary), seq_lens


def _positions(starts: Tensor, offsets: Tensor, rows: int, each: bool) -> Tensor:
    """Each row's position, int64 [rows]; without `each` its sequence's first."""
    sequence, index = rows_in_sequences(offsets, rows)
    return starts.long()[sequence] + (index if each else 0)
