"""Growing draft trees against plain loops: levels, a whole loop over a toy model, refusals, schemas."""

from __future__ import annotations

import pytest
import torch
from draft_checks import ToyModel, best_tokens, packed_trees, seeded
from step_case import int32
from torch import Tensor

from pagedtree import SamplingParams, expand_tree, rerank_tree, start_draft

pytestmark = pytest.mark.usefixtures("on_device")


def test_log_softmax_accuracy(backend: str) -> None:
    logits = torch.randn(4, 100_003, generator=seeded(0)) * 3
    logits[1] -= 1000
    state = expand_tree(start_draft(torch.arange(4), max_kv_nodes=1), logits, num_children=64)
    expected = torch.log_softmax(logits.double(), 1).topk(64).values
    torch.testing.assert_close(state.scores[:, 1:].double(), expected, rtol=1e-6, atol=1e-5)


def test_growing_loop(backend: str) -> None:
    """An engine's loop over a toy draft model gives the tree that exhaustive best-first search over paths gives."""
    model = ToyModel(vocab=50)
    roots = [7, 9, 11]
    levels = [(5, 5), (5, 6), (5, 6), (5, 0)]
    active = torch.tensor([True, False, True])
    state, cache = model.grow(roots, levels, active=active)
    draft = rerank_tree(state, 24)
    assert draft.trees.valid.tolist() == [True, False, True]
    assert draft.draft_probs is None and draft.draft_rows is None
    for b, (tokens, parents) in enumerate(packed_trees(draft)):
        if not active[b]:
            assert tokens == []
            continue
        paths: dict[tuple[int, ...], float] = {(roots[b],): 0.0}
        frontier = [(roots[b],)]
        fed = set(frontier)
        for num_children, num_frontier in levels:
            new = {}
            for path in frontier:
                logp = torch.log_softmax(model.logits(list(path)).double(), 0)
                for token in best_tokens(logp, num_children):
                    new[(*path, token)] = paths[path] + float(logp[token])
            paths |= new
            frontier = sorted(new, key=lambda path: -new[path])[:num_frontier]
            fed |= set(frontier)
        best = sorted(paths, key=lambda path: -paths[path])[:24]
        mine: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            mine.append((*(mine[parent] if parent >= 0 else ()), token))
        assert set(mine) == set(best) and len(mine) == 24
        tree = draft.trees.tree(b)
        assert tree.depths.tolist() == [len(path) - 1 for path in mine]
        begin = int(draft.trees.cu_nodes[b])
        assert draft.node_map is not None
        for path, kv in zip(mine, draft.node_map[begin : begin + 24].tolist(), strict=True):
            assert (kv >= 0) == (path in fed)
            if kv >= 0:
                assert cache[b][kv] == path[-1]


def test_more_than_a_word_of_kv_nodes(backend: str) -> None:
    """Frontiers across mask words, bit 31 included."""
    model = ToyModel(vocab=80)
    state, _ = model.grow([1, 2], [(40, 30), (4, 33), (4, 36), (2, 0)])
    assert state.num_kv == 100
    draft = rerank_tree(state, 300)
    assert draft.trees.valid.all() and draft.trees.max_depth == 4
    assert all(len(tokens) == 300 for tokens, _ in packed_trees(draft))


# Refusals, schemas ----------------------------------------------------------------------------------------------------


def test_refusals(backend: str) -> None:
    with pytest.raises(ValueError, match=r"start_draft: `root_tokens` must be int64"):
        start_draft(int32([1]), max_kv_nodes=4)
    with pytest.raises(ValueError, match=r"`max_kv_nodes` must be in 1\.\.1024, got 0"):
        start_draft(torch.tensor([1]), max_kv_nodes=0)
    with pytest.raises(ValueError, match=r"`active` must be bool \[B\]"):
        start_draft(torch.tensor([1]), max_kv_nodes=1, active=torch.tensor([True, True]))
    state = start_draft(torch.tensor([1, 2]), max_kv_nodes=4)
    logits = torch.randn(2, 8)
    for match, bad, options in [
        (r"expand_tree: `logits` must be of shape \[2, \*\] .*, got \[3, 8\]", torch.randn(3, 8), {}),
        (
            r"`logits` must be of dtype torch.float32 or torch.float16 or torch.bfloat16, got torch.float64",
            logits.double(),
            {},
        ),
        (r"`logits` must be contiguous in its last dimension", torch.randn(8, 2).t(), {}),
        (r"`num_children` must be in 1\.\.8, got 9", logits, {"num_children": 9}),
        (r"`num_children` must be in 1\.\.8, got 0", logits, {"num_children": 0}),
        (r"`num_frontier` must be in 0\.\.2, got 3", logits, {"num_frontier": 3}),
        (r"`num_frontier` must be in 0\.\.2, got -1", logits, {"num_frontier": -1}),
    ]:
        with pytest.raises(ValueError, match=match):
            expand_tree(state, bad, **({"num_children": 2} | options))
    with pytest.raises(ValueError, match=r"`num_frontier` must be at most 3 \(max_kv_nodes less those fed\), got 32"):
        expand_tree(state, torch.randn(2, 40), num_children=40, num_frontier=32)
    leaf = expand_tree(state, logits, num_children=2)
    with pytest.raises(ValueError, match=r"`frontier` must be of at least one node, got 0"):
        expand_tree(leaf, torch.randn(0, 8), num_children=2)
    with pytest.raises(ValueError, match=r"rerank_tree: `num_nodes` must be in 1\.\.1024, got 1025"):
        rerank_tree(leaf, 1025)
    with pytest.raises(ValueError, match=r"rerank_tree: `active` must be of shape \[2\]"):
        rerank_tree(leaf, 3, active=torch.tensor([True]))
    sampled = {
        "params": SamplingParams(),
        "seeds": torch.tensor([1, 2]),
        "positions": torch.tensor([0, 0]),
    }
    for match, options in [
        (r'`law` must be "topk", "iid", "swor" or "coupled", got "greedy"', {"law": "greedy"}),
        (r'`temperature` must be None under law "topk", got a tensor', sampled),
        (r"`params` must be SamplingParams under law 'iid', got None", sampled | {"law": "iid", "params": None}),
        (r"`seeds` must be a tensor under this law, got None", sampled | {"law": "swor", "seeds": None}),
        (r"`seeds` must be of dtype torch.int64, got torch.int32", sampled | {"law": "swor", "seeds": int32([1, 2])}),
        (r"`positions` must be of shape \[2\] .*, got \[1\]", sampled | {"law": "iid", "positions": torch.tensor([0])}),
        (
            r"`top_k` must be of shape \[1\] or \[2\], got \[3\]",
            sampled | {"law": "iid", "params": SamplingParams(top_k=int32([1, 2, 3]))},
        ),
        (r"`num_children` must be in 1\.\.8, got 9", sampled | {"law": "swor", "num_children": 9}),
        (r"`num_children` must be in 1\.\.1024, got 1025", sampled | {"law": "iid", "num_children": 1025}),
    ]:
        with pytest.raises(ValueError, match=match):
            expand_tree(state, logits, **({"num_children": 2} | options))
    grown = expand_tree(state, logits, num_children=2, num_frontier=1)
    with pytest.raises(ValueError, match=r"`law` must be 'topk' as in the levels before, got 'iid'"):
        expand_tree(grown, logits, num_children=2, law="iid")


def test_compile(backend: str) -> None:
    """A whole drafting phase in one graph."""

    def grow(roots: Tensor, first: Tensor, second: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        state = start_draft(roots, max_kv_nodes=8)
        state = expand_tree(state, first, num_children=4, num_frontier=3)
        level = (state.level_tokens, state.level_positions(start), state.level_mask, state.level_tree_lens)
        draft = rerank_tree(expand_tree(state, second, num_children=4), 6)
        sampled = {"law": "swor", "params": SamplingParams(top_p=0.9), "seeds": roots, "positions": start}
        drawn = rerank_tree(expand_tree(start_draft(roots, max_kv_nodes=8), first, num_children=3, **sampled), 4)
        assert draft.node_map is not None and drawn.draft_probs is not None and drawn.draft_rows is not None
        level = (*level, drawn.draft_tokens, drawn.draft_probs, drawn.draft_rows)
        return (*level, state.cu_seqlens_q, state.level_present, draft.draft_tokens, draft.trees.mask, draft.node_map)

    arguments = (torch.tensor([1, 2]), torch.randn(2, 20), torch.randn(6, 20), int32([5, 9]))
    expected = grow(*arguments)
    compiled = torch.compile(grow, fullgraph=True, backend="aot_eager")(*arguments)
    for mine, eager in zip(compiled, expected, strict=True):
        assert mine.equal(eager)
