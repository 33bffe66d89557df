"""A wrong type within an argument, or close to the right one, is a TypeError that names the argument.

Of all arguments, values of no type that anything takes: `test_calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_case import int32

import pagedtree as pt

TREES = pt.TreeBatch.from_trees([pt.DraftTree([-1])])
ZERO, TABLE, OFFSETS = int32([0], "cpu"), int32([[0]], "cpu"), int32([0, 1], "cpu")
ROWS = torch.zeros(1, 1, 4)
SLOTS = torch.zeros(1, dtype=torch.int64)

CASES: list[tuple[str, Callable[[], Any]]] = [
    ("parents", lambda: pt.DraftTree.from_parents("ab")),
    ("parents", lambda: pt.DraftTree.from_parents([-1, 0.0])),
    ("integer", lambda: pt.DraftTree.from_paths([[0.5]])),
    ("integer", lambda: pt.DraftTree.from_paths([["a"]])),
    (r"trees\[1\]", lambda: pt.TreeBatch.from_trees([pt.DraftTree([-1]), [-1, 0]])),
    (r"batches\[1\]", lambda: pt.TreeBatch.concatenate([TREES, None])),
    ("batches", lambda: pt.TreeBatch.concatenate(TREES)),
    ("length", lambda: TREES.narrow(0, 1.0)),
    ("max_nodes", lambda: pt.build_trees(-OFFSETS[1:], OFFSETS, max_nodes=1.0, max_depth=0)),
    ("cu_seqlens_q", lambda: pt.slot_mapping(TABLE, ZERO, [0, 1], 16)),
    ("page_size", lambda: pt.slot_mapping(TABLE, ZERO, OFFSETS, 16.0)),
    ("append_kv", lambda: pt.append_kv(None, None, None, None, None)),
    ("v_cache", lambda: pt.append_kv(ROWS, ROWS, ROWS[None], 0, SLOTS)),
    ("v", lambda: pt.append_kv(ROWS, [ROWS], ROWS[None], ROWS[None], SLOTS)),
    ("k_scale", lambda: pt.append_kv(ROWS, ROWS, ROWS[None], ROWS[None], SLOTS, k_scale=2.0)),
    ("q", lambda: pt.rope_append([ROWS], ROWS, ROWS, SLOTS, ROWS[0], ROWS[None], ROWS[None], SLOTS)),
    ("q_out", lambda: pt.rope_append(ROWS, ROWS, ROWS, SLOTS, ROWS[0], ROWS[None], ROWS[None], SLOTS, q_out=1)),
    ("rotary_start", lambda: pt.rope_append(
        ROWS, ROWS, ROWS, SLOTS, ROWS[0], ROWS[None], ROWS[None], SLOTS, rotary_start=0.5)),
    ("caches", lambda: pt.compact_kv(ROWS[None], TABLE, ZERO, TABLE, ZERO)),  # its pages would pass for caches
    ("merge_states", lambda: pt.merge_states(None, None, None, None)),
    ("params", lambda: pt.expand_tree(
        pt.start_draft(SLOTS, max_kv_nodes=4), ROWS[0], num_children=2, law="iid", params=0.5)),
    ("active", lambda: pt.start_draft(SLOTS, max_kv_nodes=4, active=[True])),
    ("limit", lambda: pt.select_nodes(TREES, ROWS[:, 0, 0].float(), 3, limit=2)),
    ("trees", lambda: pt.tree_delta_rule(ROWS, ROWS, ROWS, ROWS, None, ROWS, ZERO, [-1])),
    ("activation", lambda: pt.tree_conv1d(ROWS[0], ROWS[0], None, ROWS, ZERO, TREES, activation=1)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call"), CASES)
def test_type_error_names_the_argument(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=name):
        call()
