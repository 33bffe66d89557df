"""rerank_tree: the best candidates, never an orphan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from draft_checks import packed_trees, seeded
from hypothesis import given
from hypothesis import strategies as st

from pagedtree import DraftState, expand_tree, rerank_tree, start_draft

pytestmark = pytest.mark.usefixtures("on_device")


def state_of(parents: list[list[int]], scores: list[list[float]]) -> DraftState:
    batch, count = len(parents), len(parents[0])
    start = start_draft(torch.zeros(batch, dtype=torch.int64), max_kv_nodes=32)
    index = torch.arange(count).repeat(batch, 1)
    return replace(
        start,
        tokens=index + 100,
        parents=torch.tensor(parents, dtype=torch.int32),
        scores=torch.tensor(scores),
        kv_index=(index + 1000).int(),
        level_sizes=(1,) * count,  # as deep as a chain of all candidates
        law="topk",
    )


@st.composite
def scored_candidates(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Candidates whose scores never rise along a path; many ties, some absent."""
    count = draw(st.integers(1, 40))
    parents, scores = [-1], [0.0]
    for c in range(1, count):
        parent = draw(st.integers(0, c - 1))
        step = draw(st.sampled_from([0.0, 0.0, 0.5, 0.5, 1.0, math.inf]))
        parents.append(parent)
        scores.append(scores[parent] - step)
    return parents, scores


@given(scored_candidates(), st.integers(1, 45))
def test_rerank(backend: str, candidates: tuple[list[int], list[float]], num_nodes: int) -> None:
    parents, scores = candidates
    draft = rerank_tree(state_of([parents, parents], [scores, scores]), num_nodes, active=torch.tensor([False, True]))
    present = [c for c, score in enumerate(scores) if score > -math.inf]
    chosen = sorted(sorted(present, key=lambda c: (-scores[c], c))[:num_nodes])
    finished, (tokens, new_parents) = packed_trees(draft)
    assert finished == ([], [])
    assert tokens == [c + 100 for c in chosen]
    assert new_parents == [chosen.index(parents[c]) if c else -1 for c in chosen]  # an orphan raises here
    assert draft.node_map is not None
    assert draft.node_map.tolist() == [c + 1000 for c in chosen] + [-1] * (2 * num_nodes - len(chosen))
    assert draft.trees.valid.tolist() == [False, True]


@given(st.integers(0, 2**31))
def test_rerank_survives_garbage(backend: str, seed: int) -> None:
    generator = seeded(seed)
    state = state_of([[0] * 30] * 4, [[0.0] * 30] * 4)
    scores = torch.randn(4, 30, generator=generator)
    scores[torch.rand(4, 30, generator=generator) < 0.3] = math.nan
    scores[torch.rand(4, 30, generator=generator) < 0.1] = math.inf
    state = replace(
        state, parents=torch.randint(-9, 60, (4, 30), generator=generator, dtype=torch.int32), scores=scores
    )
    draft = rerank_tree(state, 11)
    for b, (tokens, _) in enumerate(packed_trees(draft)):
        assert len(tokens) == (min(11, int((scores[b] > -math.inf).sum())) if scores[b, 0] > -math.inf else 0)
        if draft.trees.valid[b]:
            draft.trees.tree(b)
    frontier = torch.randint(-5, 60, (4, 2), generator=generator, dtype=torch.int32)
    mask = torch.zeros(8, 1, dtype=torch.int32)
    grown = expand_tree(
        replace(state, frontier=frontier, mask=mask, num_kv=2), torch.randn(8, 20), num_children=4, num_frontier=3
    )
    assert not grown.scores[:, 30:].isnan().any()
