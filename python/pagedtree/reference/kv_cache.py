"""Slots, and writes to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
Table = Sequence[Sequence[int]]


def slot_of(table: Table, b: int, position: int, page_size: int) -> int:
    if position < 0 or position // page_size >= len(table[b]):
        return -1
    page = table[b][position // page_size]
    return page * page_size + position % page_size if page >= 0 else -1


def slot_mapping(
    table: Table, seq_lens: Sequence[int], offsets: Sequence[int], page_size: int, total_q: int
) -> list[int]:
    slots = [-1] * total_q
    for b, length in enumerate(seq_lens):
        n = offsets[b + 1] - offsets[b]
        for i in range(n):
            if offsets[b] + i < total_q:
                slots[offsets[b] + i] = slot_of(table, b, length - n + i, page_size)
    return slots


def append_rows(rows: Tensor, cache: Tensor, slots: Sequence[int], scale: Tensor | None) -> None:
    """Writes one side of append_kv into `cache`."""
    pages, page_size, heads, _ = cache.shape
    factor = torch.ones(heads, dtype=torch.float32) if scale is None else scale.expand(heads)
    for row, slot in zip(rows, slots, strict=True):
        if not 0 <= slot < pages * page_size:
            continue
        if rows.dtype != cache.dtype:
            row = (row.float() / factor[:, None]).clamp(-448, 448).to(cache.dtype)
        cache[slot // page_size, slot % page_size] = row


def rotated(rows: Tensor, positions: Sequence[int], cos_sin: Tensor, interleaved: bool, rotary_start: int) -> Tensor:
    """Returns the rows [T, H, D] rotated as by rope_append: every product and every sum is rounded to fp32."""
    half = cos_sin.shape[1] // 2
    result = rows.clone()
    for t, position in enumerate(positions):
        angles = cos_sin[min(max(position, 0), len(cos_sin) - 1)].float()
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            a, b = rotary_start + a, rotary_start + b
            x, y, cos, sin = rows[t, :, a].float(), rows[t, :, b].float(), angles[i], angles[i + half]
            result[t, :, a] = (x * cos - y * sin).to(rows.dtype)
            result[t, :, b] = (y * cos + x * sin).to(rows.dtype)
    return result


def compact(
    caches: Sequence[Tensor],
    table: Table,
    start: Sequence[int],
    accept_index: Sequence[Sequence[int]],
    num_accepted: Sequence[int],
) -> list[int]:
    num_pages, page_size = caches[0].shape[:2]
    lengths = []
    for b, nodes in enumerate(accept_index):
        if start[b] < 0 or not nodes or nodes[0] < 0:
            lengths.append(start[b])
            continue
        accepted = min(max(num_accepted[b], 0), len(nodes) - 1)
        lengths.append(min(start[b] + accepted + 1, INT32_MAX))
        moves = []
        for j in range(1, accepted + 1):
            source = slot_of(table, b, start[b] + nodes[j], page_size)
            target = slot_of(table, b, start[b] + j, page_size)
            if nodes[j] >= 0 and 0 <= source < num_pages * page_size and 0 <= target < num_pages * page_size:
                moves.append((source, target))
        for cache in caches:
            rows = [cache[source // page_size, source % page_size].clone() for source, _ in moves]
            for row, (_, target) in zip(rows, moves, strict=True):
                cache[target // page_size, target % page_size] = row
    return lengths
