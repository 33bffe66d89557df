"""Moving rows of SGLang's token pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedtree import compact_kv
from pagedtree._arguments import checked, refusal
from pagedtree.integrations.indices import as_int32

MOVES = 1023  # the most in one path of `compact_kv`


@checked()
def move_kv_cache(k_buffer: Sequence[Tensor], v_buffer: Sequence[Tensor], tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copies the rows of slots src_loc to slots tgt_loc, in all layers at once.

    k_buffer, v_buffer: one tensor [slots, ...] per layer, any dtype and strides, written. tgt_loc, src_loc: int32 or
    int64 [n], slots; a pair with an end outside the pool is skipped. Up to 1023 pairs may overlap: all are read before
    any is written; more move group by group, in order.

        for k, v in zip(k_buffer, v_buffer):
            k[tgt_loc], v[tgt_loc] = k[src_loc], v[src_loc]

    Raises ValueError for wrong shapes or dtypes.
    """
    for name, loc in (("tgt_loc", tgt_loc), ("src_loc", src_loc)):
        if loc.dtype not in (torch.int32, torch.int64) or loc.shape != (tgt_loc.numel(),):
            raise refusal(name, f"int32 or int64 [{tgt_loc.numel()}]", f"{loc.dtype} {[*loc.shape]}")
    caches = [buffer.unsqueeze(1) for buffer in (*k_buffer, *v_buffer)]  # pages of one slot
    if not caches:
        return
    start = tgt_loc.new_zeros(1, dtype=torch.int32)
    for targets, sources in zip(tgt_loc.split(MOVES), src_loc.split(MOVES), strict=True):
        # A path whose node j moves from behind all targets to position j.
        count = targets.numel()
        table = torch.cat([start, as_int32(targets), as_int32(sources)])[None]
        path = torch.arange(count, 2 * count + 1, dtype=torch.int32, device=table.device)[None]
        path[:, 0] = 0
        compact_kv(caches, table, start, path, start + count)
