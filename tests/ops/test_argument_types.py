"""A wrong Python type is a TypeError that names the argument, whether Python or the op itself meets it first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_case import int32

import pagedtree as pt

TREES = pt.TreeBatch.from_trees([pt.DraftTree([-1])])
VERDICT = pt.Verdict(int32([[0]], "cpu"), int32([0], "cpu"), torch.tensor([[5]]), int32([0], "cpu"))
ZERO, TABLE, OFFSETS = int32([0], "cpu"), int32([[0]], "cpu"), int32([0, 1], "cpu")
ROWS = torch.zeros(1, 1, 4)
SLOTS = torch.zeros(1, dtype=torch.int64)

CASES: list[tuple[str, Callable[[], Any]]] = [
    ("parents", lambda: pt.DraftTree.from_parents(None)),
    ("parents", lambda: pt.DraftTree.from_parents("ab")),
    ("parents", lambda: pt.DraftTree.from_parents([-1, 0.0])),
    ("integer", lambda: pt.DraftTree.from_paths([[0.5]])),
    ("integer", lambda: pt.DraftTree.from_paths([["a"]])),
    ("num_draft_tokens", lambda: pt.DraftTree.chain(1.5)),
    (r"trees\[1\]", lambda: pt.TreeBatch.from_trees([pt.DraftTree([-1]), [-1, 0]])),
    ("other", lambda: TREES.copy_(None)),
    (r"batches\[1\]", lambda: pt.TreeBatch.concatenate([TREES, None])),
    ("batches", lambda: pt.TreeBatch.concatenate(TREES)),
    ("length", lambda: TREES.narrow(0, 1.0)),
    ("start", lambda: TREES.narrow(None, 1)),
    ("parents", lambda: pt.build_trees([-1], OFFSETS, max_nodes=1, max_depth=0)),
    ("max_nodes", lambda: pt.build_trees(-OFFSETS[1:], OFFSETS, max_nodes=1.0, max_depth=0)),
    ("page_table", lambda: pt.slot_mapping(None, ZERO, OFFSETS, 16)),
    ("cu_seqlens_q", lambda: pt.slot_mapping(TABLE, ZERO, [0, 1], 16)),
    ("page_size", lambda: pt.slot_mapping(TABLE, ZERO, OFFSETS, 16.0)),
    ("append_kv", lambda: pt.append_kv(None, None, None, None, None)),
    ("k_cache", lambda: pt.append_kv(ROWS, ROWS, None, ROWS[None], SLOTS)),
    ("v_cache", lambda: pt.append_kv(ROWS, ROWS, ROWS[None], 0, SLOTS)),
    ("v", lambda: pt.append_kv(ROWS, [ROWS], ROWS[None], ROWS[None], SLOTS)),
    ("k_scale", lambda: pt.append_kv(ROWS, ROWS, ROWS[None], ROWS[None], SLOTS, k_scale=2.0)),
    ("caches", lambda: pt.compact_kv(ROWS[None], TABLE, ZERO, TABLE, ZERO)),  # its pages would pass for caches
    ("page_table", lambda: pt.compact_kv([ROWS], None, ZERO, TABLE, ZERO)),
    ("trees", lambda: pt.prepare_step(None, TABLE, ZERO, 16, total_q=1)),
    ("verdict", lambda: pt.commit(None, TREES, ZERO)),
    ("trees", lambda: pt.commit(VERDICT, None, ZERO)),
    ("merge_states", lambda: pt.merge_states(None, None, None, None)),
    ("q", lambda: pt.tree_attention(None, *[ROWS[None]] * 2, TABLE, ZERO, OFFSETS, out=ROWS, return_lse=True)),
    ("lse_a", lambda: pt.merge_states(ROWS, None, ROWS, None)),
    ("seq_lens", lambda: pt.attention_plan(
        None, OFFSETS, num_q_heads=1, num_kv_heads=1, head_dim=64, page_size=1, max_seqlen_q=1)),
    ("root_tokens", lambda: pt.start_draft(None, max_kv_nodes=4)),
    ("state", lambda: pt.expand_tree(None, ROWS[0], num_children=2)),
    ("params", lambda: pt.expand_tree(
        pt.start_draft(SLOTS, max_kv_nodes=4), ROWS[0], num_children=2, law="iid", params=0.5)),
    ("state", lambda: pt.rerank_tree(None, 3)),
    ("history", lambda: pt.ngram_propose(None, ZERO, max_nodes=4, max_depth=2)),
    ("active", lambda: pt.start_draft(SLOTS, max_kv_nodes=4, active=[True])),
    ("predictions", lambda: pt.rejected_predictions(TREES, SLOTS, [0], TABLE)),
    ("trees", lambda: pt.rejected_predictions(None, SLOTS, SLOTS, TABLE)),
    ("head_logits", lambda: pt.medusa_propose(None, pt.DraftTree.chain(1))),
    ("tree", lambda: pt.medusa_propose(ROWS, [-1, 0])),
    ("log_probs", lambda: pt.best_first_tree(None, SLOTS, SLOTS, 3)),
    ("tokens", lambda: pt.best_first_tree(ROWS.float(), None, SLOTS, 3)),
    ("trees", lambda: pt.select_nodes(None, SLOTS, 3)),
    ("survival", lambda: pt.select_nodes(TREES, None, 3)),
    ("limit", lambda: pt.select_nodes(TREES, ROWS[:, 0, 0].float(), 3, limit=2)),
    ("q", lambda: pt.tree_delta_rule(None, ROWS, ROWS, ROWS, None, ROWS, ZERO, TREES)),
    ("trees", lambda: pt.tree_delta_rule(ROWS, ROWS, ROWS, ROWS, None, ROWS, ZERO, [-1])),
    ("state", lambda: pt.advance_state(None, ZERO, ROWS, ROWS, ROWS, None, TREES)),
    ("weight", lambda: pt.tree_conv1d(ROWS[0], None, None, ROWS, ZERO, TREES)),
    ("activation", lambda: pt.tree_conv1d(ROWS[0], ROWS[0], None, ROWS, ZERO, TREES, activation=1)),
    ("x", lambda: pt.advance_conv(ROWS, ZERO, None, TREES)),
    ("logits", lambda: pt.sample(None, pt.SamplingParams(), seeds=SLOTS, positions=SLOTS)),
    ("seeds", lambda: pt.sample(ROWS[0], pt.SamplingParams(), seeds=None, positions=SLOTS)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call"), CASES)
def test_type_error_names_the_argument(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=name):
        call()
