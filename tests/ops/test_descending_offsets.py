"""Descending offsets read as ascending on every backend: no row belongs to two sequences."""

from __future__ import annotations

import random

import pytest
import torch
from raw_case import raw_calls
from step_case import int32, int64

import pagedtree as pt

FAR = 2**31 - 1
OFFSETS = ("cu_nodes", "cu_seqlens_q", "cu_seqlens")
# Without ranks' ops, whose words come from the round before, and backend-specific plans.
CALLS = [
    (i, name)
    for i, call in enumerate(raw_calls())
    for name in OFFSETS
    if name in call.tensors() and not call.name.endswith("_shards") and call.name != "attention_plan"
]


def sequence_of(row: int, offsets: list[int]) -> int:
    """Returns a row's sequence by binary search, bit by bit; -1 for none."""
    found, batch = 0, len(offsets) - 1
    for bit in (8, 4, 2, 1):
        if found + bit <= batch and offsets[found + bit] <= row:
            found += bit
    return found if offsets[found] <= row else -1


def ascending(offsets: list[int]) -> list[int]:
    """Returns the offsets that ops read instead."""
    bounds = sorted({0, *(max(offset, 0) for offset in offsets)})
    return [next(row for row in bounds if sequence_of(row, offsets) >= b) for b in range(len(offsets))]


def random_offsets(rng: random.Random, offsets: list[int]) -> list[int]:
    found = list(offsets)
    for _ in range(rng.randrange(1, 4)):
        found[rng.randrange(len(found))] = rng.choice([*range(-2, offsets[-1] + 3), FAR, -FAR - 1])
    return rng.sample(found, len(found)) if rng.random() < 0.2 else found


@pytest.mark.parametrize(("index", "name"), CALLS)
def test_they_are_read_as_ascending(
    backend: str, device: torch.device, index: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", "reverse")  # changes a row that two CTAs write
    call, rng, descending = raw_calls(device)[index], random.Random(0), 0
    good = call.arguments[name].tolist()
    assert ascending(good) == good
    for _ in range(15 if "attention" in call.name else 40):
        offsets = random_offsets(rng, good)
        descending += sorted(offsets) != offsets
        results = []
        for values in (offsets, ascending(offsets)):
            call.arguments[name] = int32(values, device)
            results.append({key: t for key, t in call.named_results().items() if not key.startswith(name)})
        original = int32(offsets, device)
        for key, found in results[0].items():
            expected = results[1][key]
            # Some ops return the offsets, or clamp them to the rows.
            is_own = found.shape == original.shape and found.equal(original.clamp(*found.aminmax()))
            assert is_own or torch.allclose(found, expected, 0, 0, equal_nan=True), (call.name, offsets, key)
    assert descending > 5


def test_the_first_and_last_rows_of_no_sequence() -> None:
    trees = pt.build_trees(int32([-1] * 8), int32([3, 1, 6, 4]), max_nodes=4, max_depth=2)
    assert trees.depths.tolist() == [-1, 0, *[-1] * 6]  # rows 1 to 5 are one tree
    assert ascending([3, 1, 6, 4]) == [1, 1, 6, 6]
    assert ascending([5, 3]) == [3, 3]
    slots = pt.slot_mapping(int64([[0, 1]]).int(), int32([4]), int32([5, 3]), 4, total_q=6)
    assert slots.tolist() == [-1] * 6
