"""prepare_step against plain loops."""

from __future__ import annotations

<<<<<<< HEAD
import pytest
from step_case import batch_of, int32, int64
=======
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_case import batch_of, int32, tree_parents
>>>>>>> 7e0eeeab (Tests of the refusals that the table has go)

from pagedtree import (
    prepare_step,
)


<<<<<<< HEAD
def test_prepare_step_refuses(backend, device) -> None:
    trees = batch_of([[-1, 0]], device)
    good = {"trees": trees, "page_table": int32([[0, 1]], device), "start": int32([1], device), "page_size": 2}
    assert prepare_step(**good, total_q=2)[3].tolist() == [1, 2]
    for name, value, message in [
        ("page_table", int32([[0, 1], [2, 3]], device), r"`page_table` must be of shape \[1, \*\] .*, got \[2, 2\]"),
        ("page_table", int64([[0, 1]], device), "`page_table` must be of dtype torch.int32, got torch.int64"),
        ("start", int32([1, 2], device), r"`start` must be of shape \[1\] .*, got \[2\]"),
        ("start", int32([1, 9, 2, 9], device)[::2][:1].expand(2)[:1].double(), "`start` must be of dtype torch.int32"),
        ("page_size", 0, "`page_size` must be in 1..2147483647, got 0"),
        ("total_q", -1, "`total_q` must be at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=f"prepare_step: {message}"):
            prepare_step(**{"total_q": 2, **good, name: value})


def test_prepare_step_value_checks(value_checks, device) -> None:
    trees = batch_of([[-1, 0], [-1, 0]], device)
    table = int32([[0, 1], [2, -5]], device)
    shared = int32([[3, 1], [1, 3]], device)
    for start, total_q, message in [
        ([1, 0], 3, "`cu_nodes` must be at most 3 rows, got 4"),
        ([3, 0], 4, "wide enough for position 4 of sequence 0"),
        ([1, 1], 4, r"`page_table\[1, 1\]` must be a page id"),
    ]:
        with pytest.raises(ValueError, match=f"prepare_step: .*{message}"):
            prepare_step(trees, table, int32(start, device), 2, total_q=total_q)
    assert prepare_step(trees, table, int32([-1, 0], device), 2, total_q=4)[1].tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"`page_table\[1, 0\]` must be a page that no other sequence writes, got 1"):
        prepare_step(trees, shared, int32([2, 0], device), 2, total_q=4)
    assert prepare_step(trees, shared, int32([2, 2], device), 2, total_q=4)[1].tolist() == [4, 4]
=======
@given(
    parents=st.lists(st.one_of(tree_parents(), st.lists(st.integers(-2, 9), max_size=8)), max_size=5),
    page_size=st.sampled_from([1, 7, 16, 61]),
    padding=st.integers(0, 4),
    extra=st.integers(-3, 5),
    seed=st.integers(0, 99),
)
def test_prepare_step(backend, device, parents, page_size, padding, extra, seed) -> None:
    rng = np.random.default_rng(seed)
    trees = batch_of(parents, device, padding)
    batch, rows = len(parents), sum(len(p) for p in parents)
    max_pages = -(-100 // page_size)
    table = rng.integers(0, 2**31, size=(batch, max_pages + 1))  # slots far past 2^31 too
    start = [int(rng.integers(0, 80)) if rng.random() < 0.9 else -1 for _ in range(batch)]
    total_q = max(0, rows + padding + extra)
    positions, slots, seq_lens = [0] * total_q, [-1] * total_q, [0] * batch
    offsets = [min(int(o), total_q) for o in np.concatenate([[0], np.cumsum([len(p) for p in parents])])]
    depths = trees.depths.tolist()
    for b in range(batch):
        if start[b] < 0:
            continue
        seq_lens[b] = start[b] + offsets[b + 1] - offsets[b]
        for row in range(offsets[b], offsets[b + 1]):
            position = start[b] + row - offsets[b]
            positions[row] = start[b] + max(depths[row], 0)
            slots[row] = int(table[b, position // page_size]) * page_size + position % page_size
    page_table = torch.from_numpy(table.astype(np.int32)).to(device)[:, :max_pages]
    got = prepare_step(trees, page_table, int32(start, device), page_size, total_q=total_q)
    assert [t.dtype for t in got] == [torch.int64, torch.int32, torch.int32, torch.int64]
    assert [t.tolist() for t in got] == [positions, seq_lens, offsets, slots]
    if -1 not in start:  # the slots are those of slot_mapping
        assert torch.equal(got[3], slot_mapping(page_table, got[1], got[2], page_size, total_q=total_q))


def test_prepare_step_bad_values(backend, device) -> None:
    trees = batch_of([[-1, 0, 1], [-1, 0]], device)
    table = int32([[3, -2], [5, 6]], device)
    _, seq_lens, _, slots = prepare_step(trees, table, int32([1, 3], device), 2, total_q=5)
    assert slots.tolist() == [7, -1, -1, 13, -1] and seq_lens.tolist() == [4, 5]  # no page; past the table
    positions, seq_lens, _, slots = prepare_step(trees, table, int32([2**31 - 1, -(2**31)], device), 2, total_q=5)
    assert positions.tolist() == [2**31 - 1, 2**31, 2**31 + 1, 0, 0]
    assert seq_lens.tolist() == [2**31 - 1, 0] and slots.tolist() == [-1] * 5
    for offsets in ([0, 99, 3], [9, -4, 2], [-(2**31), 2**31 - 1, 0], [3, 2, 1]):
        trees.cu_nodes.copy_(int32(offsets, device))
        _, seq_lens, cu_seqlens_q, slots = prepare_step(trees, table, int32([0, 1], device), 2, total_q=5)
        assert all(0 <= offset <= 5 for offset in cu_seqlens_q.tolist())
        assert all(0 <= length <= 6 for length in seq_lens.tolist())
        assert all(-1 <= slot <= 13 for slot in slots.tolist())
>>>>>>> 7e0eeeab (Tests of the refusals that the table has go)
