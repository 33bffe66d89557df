"""expand_tree's random laws: draws, distributions, the tree's shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import seeded
from support.devices import slow_on_simt
from support.exact import LIMIT, excess
from torch import Tensor

from pagedtree import (
    SamplingParams,
    expand_tree,
    reference,
    rerank_tree,
    sample,
    start_draft,
    verify_block,
    verify_rejection,
    verify_sampled,
    verify_traversal,
)
from pagedtree.drafting import DraftState

pytestmark = pytest.mark.usefixtures("on_device")


def draw(logits: Tensor, num_children: int, law: str, seeds: Tensor, positions: Tensor, **params) -> DraftState:
    state = start_draft(torch.zeros(logits.shape[0], dtype=torch.int64), max_kv_nodes=1)
    sampling = SamplingParams(**params)
    return expand_tree(
        state, logits, num_children=num_children, law=law, params=sampling, seeds=seeds, positions=positions
    )


@pytest.mark.parametrize(
    "params", [{}, pytest.param({"temperature": 0.5}, marks=pytest.mark.slow), {"top_k": 3}], ids=str
)
def test_joint_distribution_of_two_draws(backend: str, draws: Callable[[int], int], params: dict) -> None:
    """Ordered pairs match enumeration, independent of the target's noise at that position."""
    count = draws(60_000)
    row = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.4])
    logits = row.expand(count, -1).contiguous()
    seeds, positions = torch.arange(count) * 7919 + 3, torch.arange(count) % 11
    q = reference.distribution(reference.clean_logits(row), **params)
    for law in ("iid", "swor"):
        state = draw(logits, 2, law, seeds, positions, **params)
        first, second = state.tokens[:, 1].cpu().numpy(), state.tokens[:, 2].cpu().numpy()
        pairs = np.zeros((5, 5))
        np.add.at(pairs, (first, second), 1)
        expected = np.outer(q, q)
        if law == "swor":
            np.fill_diagonal(expected, 0)
            expected /= 1 - q[:, None]
        assert excess(pairs, expected) < LIMIT
        target = sample(logits, SamplingParams(**params), seeds=seeds, positions=positions).cpu().numpy()
        joint = np.zeros((5, 5))
        np.add.at(joint, (target, first), 1)
        assert excess(joint, np.outer(q, q)) < LIMIT


@pytest.mark.parametrize("law", ["iid", "swor", "coupled"])
def test_draws_of_cousins(backend: str, law: str) -> None:
    """Nodes of one level draw independently, unless coupled: then they share the target's noise."""
    count, vocab = 200, 9
    seeds, positions = torch.arange(count), torch.full((count,), 5)
    sampled = {"law": law, "params": SamplingParams(), "seeds": seeds, "positions": positions}
    row = torch.randn(vocab, generator=seeded(8))
    state = start_draft(torch.zeros(count, dtype=torch.int64), max_kv_nodes=4)
    state = expand_tree(state, row.expand(count, -1), num_children=3, num_frontier=3, **sampled)
    state = expand_tree(state, row.repeat(3 * count, 1), num_children=1, **sampled)
    children = state.tokens[:, -3:]
    for other in (1, 2):
        equal = float((children[:, 0] == children[:, other]).float().mean())
        expected = 1.0 if law == "coupled" else float(row.softmax(0).square().sum())
        assert abs(equal - expected) < 4 * math.sqrt(expected * (1 - expected) / count) + 1e-6


def test_coupled_drafts_are_accepted_more_often(backend: str, draws: Callable[[int], int]) -> None:
    count, vocab = draws(4000), 30
    target, wrong = (torch.randn(count, vocab, generator=seeded(seed)) for seed in (2, 3))
    seeds = torch.arange(count)
    positions, sampling = torch.full((count,), 9), SamplingParams()
    accepted = {}
    for law in ("topk", "iid", "swor", "coupled"):
        state = start_draft(torch.zeros(count, dtype=torch.int64), max_kv_nodes=1)
        options = {} if law == "topk" else {"params": sampling, "seeds": seeds, "positions": positions}
        state = expand_tree(state, 2 * target + wrong, num_children=2, law=law, **options)
        draft, rows = rerank_tree(state, 3), (2 * target).repeat_interleave(3, 0)
        verdict = verify_sampled(rows, draft.draft_tokens, draft.trees, sampling, seeds=seeds, positions=positions)
        assert verdict.tokens[:, 0].equal(sample(2 * target, sampling, seeds=seeds, positions=positions))
        accepted[law] = float(verdict.num_accepted.float().mean())
    assert accepted["coupled"] > max(accepted["topk"], accepted["swor"], accepted["iid"]) + 0.1


# Drafting and verification --------------------------------------------------------------------------------------------


@slow_on_simt
@pytest.mark.parametrize(
    ("law", "rule"),
    [  # the core suite has each rule once
        pytest.param(law, rule, marks=[] if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, law in enumerate(("iid", "swor"))
        for j, rule in enumerate((verify_rejection, verify_traversal, verify_block))
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_drawn_drafts_are_independent_of_their_verification(
    backend: str, draws: Callable[[int], int], law: str, rule: Callable
) -> None:
    """Sharing one seed keeps the output on the target's distribution."""
    count, vocab, children = draws(40_000), 4, 1 if rule is verify_block else 2
    generator = seeded(6)
    # The root has the last row.
    target, drafter = (torch.randn(vocab + 1, vocab, generator=generator) for _ in range(2))
    seeds, positions, sampling = torch.arange(count) * 3 + 1, torch.arange(count) % 5, SamplingParams()
    sampled = {"law": law, "params": sampling, "seeds": seeds, "positions": positions}
    state = start_draft(torch.full((count,), vocab), max_kv_nodes=1 + children)
    state = expand_tree(state, drafter[state.level_tokens], num_children=children, num_frontier=children, **sampled)
    state = expand_tree(state, drafter[state.level_tokens], num_children=children, **sampled)
    draft = rerank_tree(state, state.num_candidates)
    verdict = rule(
        target[draft.draft_tokens], draft.draft_tokens, draft.trees, sampling, draft_law=law,
        draft_probs=draft.draft_probs, draft_rows=draft.draft_rows, seeds=seeds, positions=positions,
    )  # fmt: skip
    first, second = verdict.tokens[:, 0], verdict.tokens[:, 1]
    samples = sample(target[first], sampling, seeds=seeds, positions=positions + 1)
    pairs = np.zeros((vocab, vocab))
    np.add.at(pairs, (first.cpu().numpy(), torch.where(second >= 0, second, samples).cpu().numpy()), 1)
    p = target.softmax(-1).double().cpu().numpy()
    assert excess(pairs, p[vocab][:, None] * p[:vocab]) < LIMIT
    assert 0.2 < float(verdict.num_accepted.float().mean()) < 1.9
