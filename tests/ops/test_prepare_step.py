"""prepare_step against plain loops."""

from __future__ import annotations

import pytest
from step_case import batch_of, int32, int64

from pagedtree import (
    prepare_step,
)


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
