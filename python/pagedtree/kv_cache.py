"""The paged KV cache: slots of positions, writing new rows, compacting accepted rows.

A *slot* is page * page_size + offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import expect_type, refusal
from pagedtree._ops import Prepared, call, has_no_values, ops, python_error, register_fake

__all__ = ["PreparedCompaction", "append_kv", "compact_kv", "rope_append", "slot_mapping"]


def slot_mapping(
    page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, page_size: int, *, total_q: int | None = None
) -> Tensor:
    """Returns the slots of each sequence's last q_len positions, where `append_kv` puts its new rows.

    Args:
        page_table: int32 [B, max_pages], rows may be strided.
        seq_lens: int32 [B], lengths including the new rows.
        cu_seqlens_q: int32 [B + 1], first 0, offsets of the new rows.
        page_size: positions per page, >= 1.
        total_q: T, the rows of the result, at least cu_seqlens_q[-1]. Without it cu_seqlens_q[-1] is read, which
            synchronises, cannot be captured or compiled with fullgraph=True, and must fit page_table's positions.

    Returns int64 [T]; -1 for padding rows past cu_seqlens_q[-1], for positions below 0 or past the table, and for
    negative page ids. Page ids have no upper bound here.

        for b in range(B):
            n = cu_seqlens_q[b + 1] - cu_seqlens_q[b]
            for i in range(n):
                p = seq_lens[b] - n + i
                slots[cu_seqlens_q[b] + i] = page_table[b, p // page_size] * page_size + p % page_size

    Source: PagedAttention (Kwon et al., SOSP 2023); vLLM's name.

    Raises ValueError for wrong shapes, dtypes, devices or sizes; with PAGEDTREE_CHECK=1 also for offsets that descend
    or pass T, fewer positions than rows, and positions without a page.
    """
    if total_q is None:
        expect_type("cu_seqlens_q", cu_seqlens_q, Tensor)
        expect_type("page_table", page_table, Tensor)
        total_q = _last_offset(cu_seqlens_q, page_table, page_size)
    return call(ops.slot_mapping, page_table, seq_lens, cu_seqlens_q, page_size, total_q=total_q)


def _last_offset(cu_seqlens_q: Tensor, page_table: Tensor, page_size: int) -> int:
    is_batch = cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.dim() == 1 and cu_seqlens_q.numel() > 0
    if not is_batch or not isinstance(page_size, int) or page_size < 1:
        return 0
    total_q = int(cu_seqlens_q[-1])
    room = page_table.numel() * page_size
    if not 0 <= total_q <= room:
        raise refusal("cu_seqlens_q", f"an end in 0..{room}, the positions of page_table", total_q)
    return total_q


def append_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes a row of K and of V for each token into the cache.

    Args:
        k: [T, Hkv, D] of fp32, fp16, bf16 or float8_e4m3fn, any sizes; any strides but a contiguous last dimension.
        v: [T, Hkv, Dv] of k's dtype. None: the cache holds only k, as MLA's latent cache does.
        k_cache, v_cache: [pages, page_size, Hkv, D] and [pages, page_size, Hkv, Dv], written; any strides but a
            contiguous last dimension. Their dtype is k.dtype (rows are copied bit by bit) or float8_e4m3fn (rows are
            converted). v_cache is None if v is.
        slots: int64 [T], slot = page * page_size + offset; -1 skips the token. So does a slot outside the cache
            (PAGEDTREE_CHECK=1 raises). Any one of several tokens with one slot stays.
        k_scale, v_scale: fp32, scalar ([] or [1]) or [Hkv], factors by which attention multiplies the cache; only for
            converted rows, v_scale only with v. None = 1.

    Conversion stores saturate(k / k_scale), divided in fp32: the nearest e4m3 value, ties to even, infinities saturated
    to 448; NaN stays NaN.

        for t in range(T):
            if 0 <= slots[t] < pages * page_size:
                k_cache[slots[t] // page_size, slots[t] % page_size] = k[t]
                if v is not None:
                    v_cache[slots[t] // page_size, slots[t] % page_size] = v[t]

    Sources: PagedAttention (Kwon et al., SOSP 2023); the latent cache is DeepSeek-V2's.

    Raises ValueError for wrong shapes, dtypes, devices or strides, a scale without conversion, and one of v and v_cache
    without the other, before anything is written.
    """
    call(ops.append_kv, k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


def rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    *,
    interleaved: bool = False,
    rotary_start: int = 0,
    q_out: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotates queries and keys (rotary embedding) and appends keys and values, in one launch.

    Args:
        q: [T, Hq, D] of fp32, fp16 or bf16, any sizes; any strides but a contiguous last dimension.
        k: [T, Hkv, D] of q's dtype, strides as for q; not written.
        v: [T, Hkv, Dv] of q's dtype, or None; see `append_kv`.
        positions: int64 [T], rows of cos_sin. One outside reads the nearest row (PAGEDTREE_CHECK=1 raises).
        cos_sin: [P, rotary_dim] of fp32 or q's dtype, any row stride: for each position the cosines of the rotary_dim /
            2 frequencies, then their sines, scaling factors (YaRN's) included. P >= 1 if T > 0; rotary_dim is even and
            at most D.
        k_cache, v_cache, slots, k_scale, v_scale: as for `append_kv`. The query of a skipped token is still rotated.
        interleaved: whether pairs are neighbours (GPT-J, DeepSeek); else they span the halves of the rotary columns
            (GPT-NeoX, Llama).
        rotary_start: the first rotary column; columns before and after them pass unchanged.
        q_out: of q's shape and dtype, last dimension contiguous, written: q itself, or memory that q does not share.
            Default: a new tensor.

    Returns q_out. Products and sums are fp32, each rounded; the result is rounded to q's dtype.

        half = rotary_dim // 2
        for t in range(T):
            cos, sin = cos_sin[positions[t], :half], cos_sin[positions[t], half:]
            for i in range(half):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                a, b = a + rotary_start, b + rotary_start
                for x, y in ((q[t], q_out[t]), (k[t], rotated_k[t])):  # of all heads
                    y[:, a], y[:, b] = x[:, a] * cos[i] - x[:, b] * sin[i], x[:, b] * cos[i] + x[:, a] * sin[i]
        append_kv(rotated_k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)

    Sources: rotary embedding (Su et al., RoFormer, 2021); the table is vLLM's `cos_sin_cache`.

    Raises ValueError for wrong shapes, dtypes, devices, strides or columns, before anything is written.
    """
    arguments = (q, k, v, positions, cos_sin, k_cache, v_cache, slots)
    options = {"interleaved": interleaved, "rotary_start": rotary_start, "k_scale": k_scale, "v_scale": v_scale}
    if q_out is None:
        rotated: Tensor = call(ops.rope_append, *arguments, **options)
        return rotated
    call(ops.rope_append.out, *arguments, **options, q_out=q_out)
    return q_out


def compact_kv(
    caches: Sequence[Tensor], page_table: Tensor, start: Tensor, accept_index: Tensor, num_accepted: Tensor
) -> Tensor:
    """Moves the rows of each accepted path together, behind the root's, in all layers at once.

    Args:
        caches: tensors [pages, page_size, ...], written: all layers, K and V, latent caches, scales; any dtypes, any
            strides (at most three strided dimensions per row besides contiguous runs), the same pages and page_size.
            Elements must not overlap. One launch takes up to 128 tensors.
        page_table: int32 [B, max_pages], rows may be strided.
        start: int32 [B], position of node 0; negative = idle.
        accept_index: int32 [B, S], S <= 1024, rows may be strided: node ids of the path, [b, 0] = 0, or -1 = idle.
        num_accepted: int32 [B]; clamped to 0..S - 1.

    Returns the new seq_lens, int32 [B]: start + num_accepted + 1. An idle sequence keeps its start, and nothing moves.
    All other slots keep their bits.

        for cache in caches:
            for b in range(B):
                rows = [cache[slot(b, start[b] + accept_index[b, j])].clone() for j in range(1, num_accepted[b] + 1)]
                for j, row in enumerate(rows, start=1):
                    cache[slot(b, start[b] + j)] = row

    A row with an end outside the table or pool, or a negative node id, is not moved; PAGEDTREE_CHECK=1 raises instead,
    also for a path that does not ascend. Two sequences must not share the pages of their trees.

    Raises ValueError for wrong shapes, dtypes or devices, before anything is written.
    """
    expect_type("caches", caches, Sequence)  # a tensor would be iterated page by page
    caches = list(caches)
    if not caches and torch.compiler.is_compiling():  # torch 2.13's inductor fails on a call that writes to nothing
        caches = [page_table.new_empty((0, 0))]
    return call(ops.compact_kv, caches, page_table, start, accept_index, num_accepted)


class PreparedCompaction:
    """A prepared `compact_kv` call, for caches that stay the same from step to step.

        compact = PreparedCompaction(caches)
        for each step:
            seq_lens = compact(page_table, start, accept_index, num_accepted)   # compact_kv(caches, page_table, ...)

    Takes a tenth of the host time with many caches; results are bitwise equal. Caches are validated once, and again
    after a resize or new memory; new tensors need a new object. With gradients enabled or under compilation each call
    is a plain `compact_kv`: use `torch.no_grad`. Raises ValueError for wrong shapes, strides or devices.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        expect_type("caches", caches, Sequence)
        self._caches = list(caches)
        self._prepared: Prepared | None = None
        self._with_versions: list[Tensor] = []
        are_tensors = all(isinstance(cache, Tensor) for cache in self._caches)
        if self._caches and not (are_tensors and any(map(has_no_values, self._caches))):
            self._prepared = Prepared(call(_prepare_compaction, self._caches))
            self._with_versions = [cache for cache in self._caches if not cache.is_inference()]

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedCompaction, (self._caches,)

    def __call__(self, page_table: Tensor, start: Tensor, accept_index: Tensor, num_accepted: Tensor) -> Tensor:
        """Moves the rows of one step's accepted paths, as `compact_kv` does; returns the new seq_lens, int32 [B]."""
        if self._prepared is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return compact_kv(self._caches, page_table, start, accept_index, num_accepted)
        moves = (page_table, start, accept_index, num_accepted, self._prepared.number)
        try:
            seq_lens: Tensor = _compact(*moves)
        except RuntimeError as error:
            raise python_error(error, _compact, moves, {}) from None
        if self._with_versions:
            torch.autograd.graph.increment_version(self._with_versions)
        return seq_lens


_compact, _prepare_compaction = ops._compact.default, ops._prepare_compaction.default


register_fake("slot_mapping")(lambda page_table, total_q, **others: page_table.new_empty((total_q,), dtype=torch.int64))
register_fake("rope_append")(lambda q, **others: q.new_empty(q.shape))
register_fake("compact_kv")(lambda start, **others: torch.empty_like(start))
for _name in ("append_kv", "rope_append.out"):
    register_fake(_name)(lambda **others: None)
