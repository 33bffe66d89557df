from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import seeded
from support.batches import packed_trees

from pagedtree.drafting import DraftState, expand_tree, rerank_tree, start_draft

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
        level_sizes=(1,) * count,  # depth of a chain of all
        law="topk",
    )


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
    result = expand_tree(
        replace(state, frontier=frontier, mask=mask, num_kv=2), torch.randn(8, 20), num_children=4, num_frontier=3
    )
    assert not result.scores[:, 30:].isnan().any()
