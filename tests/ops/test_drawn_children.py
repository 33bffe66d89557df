"""expand_tree under the laws "iid", "swor" and "coupled": draws, their distributions, the shape of the tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from device_case import slow_on_simt
from draft_checks import ToyModel, packed_trees, seeded
from torch import Tensor

from pagedtree import (
    DraftState,
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

pytestmark = pytest.mark.usefixtures("on_device")


SAMPLINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.05, "top_p": 0.9, "filter_order": "joint"},
]


def draw(logits: Tensor, num_children: int, law: str, seeds: Tensor, positions: Tensor, **params) -> DraftState:
    """Children of roots whose rows are `logits`."""
    state = start_draft(torch.zeros(logits.shape[0], dtype=torch.int64), max_kv_nodes=1)
    sampling = SamplingParams(**params)
    return expand_tree(
        state, logits, num_children=num_children, law=law, params=sampling, seeds=seeds, positions=positions
    )


def expected_children(
    q: np.ndarray, count: int, law: str, seed: int, position: int, place: int = 0
) -> tuple[list[int], float]:
    """The draws from distribution q at frontier node `place`, and by how much the nearest of them was decided."""
    use = reference.GUMBEL if law == "coupled" else reference.draft_use(place)
    if law in ("swor", "coupled"):
        with np.errstate(divide="ignore"):
            scores = np.log(q) + reference.gumbel_noise(seed, position, q.size, use=use)
        order = [x for x in np.argsort(-scores, kind="stable") if q[x] > 0]
        margin = min((scores[a] - scores[b] for a, b in pairwise(order[: count + 1])), default=math.inf)
        return order[:count], float(margin)
    words = reference.random_words(seed, position, count, use).astype(np.float64)
    u = words[:, 0] * 2.0**-32 + words[:, 1] * 2.0**-64
    cdf = np.cumsum(q)
    tokens = np.searchsorted(cdf, u, side="right")
    return [min(int(x), int(np.flatnonzero(q)[-1])) for x in tokens], float(np.abs(cdf[:, None] - u).min())


@pytest.mark.each_value
@pytest.mark.parametrize("law", ["iid", "swor"])
@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_draws(backend: str, law: str, params: dict) -> None:
    """Tokens, scores and distributions of drawn children, in every dtype and around the vectors' ends."""
    generator = seeded(5)
    compared = 0
    for vocab in (1, 3, 8, 33, 64, 129, 1500):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            count = min(6, vocab)
            logits = (torch.randn(4, vocab + 1, generator=generator) * 3).to(dtype)[:, :vocab]
            seeds = torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator)
            positions = torch.randint(0, 2**40, (4,), generator=generator)
            state = draw(logits, count, law, seeds, positions, **params)
            assert state.draft_probs[0].shape == (4, 1, vocab)
            for b in range(4):
                q = reference.distribution(reference.clean_logits(logits[b]), **params)
                probs = state.draft_probs[0][b, 0].cpu().numpy()
                np.testing.assert_allclose(probs, q, rtol=1e-5, atol=1e-9)
                assert ((probs > 0) <= (q > 0)).all()
                tokens = state.tokens[b, 1:].tolist()
                drawn = [x for x in tokens if x >= 0]
                assert drawn == tokens[: len(drawn)]
                assert state.scores[b, 1:].tolist() == pytest.approx(
                    [math.log(probs[x]) if x >= 0 else -math.inf for x in tokens], abs=1e-6
                )
                expected, margin = expected_children(q, count, law, int(seeds[b]), int(positions[b]))
                if margin > 1e-5:
                    assert drawn == expected
                    compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    "params", [{}, pytest.param({"temperature": 0.5}, marks=pytest.mark.slow), {"top_k": 3}], ids=str
)
def test_joint_distribution_of_two_draws(backend: str, draws: Callable[[int], int], params: dict) -> None:
    """Ordered pairs against exact enumeration; the target's own noise at the same place is independent of them."""
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
        assert_distribution(pairs, expected * count)
        target = sample(logits, SamplingParams(**params), seeds=seeds, positions=positions).cpu().numpy()
        joint = np.zeros((5, 5))
        np.add.at(joint, (target, first), 1)
        assert_distribution(joint, np.outer(q, q) * count)


@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_coupled_draws_share_the_targets_noise(backend: str, params: dict) -> None:
    """The noise ranks the children; where both distributions are equal, the target samples the first child."""
    count, compared = 40, 0
    for vocab in (3, 130):
        logits = torch.randn(count, vocab, generator=seeded(vocab)) * 3
        seeds, positions = torch.arange(count) * 7919 + 3, torch.arange(count) % 11
        state = draw(logits, 3, "coupled", seeds, positions, **params)
        assert state.draft_probs == () and rerank_tree(state, 4).draft_probs is None
        target = sample(logits, SamplingParams(**params), seeds=seeds, positions=positions)
        for b in range(count):
            q = reference.distribution(reference.clean_logits(logits[b]), **params)
            expected, margin = expected_children(q, 3, "coupled", int(seeds[b]), int(positions[b]))
            if margin > 1e-5:
                assert state.tokens[b, 1:].tolist() == expected + [-1] * (3 - len(expected))
                assert target[b] == expected[0]
                compared += 1
    assert compared > 70


def assert_distribution(observed: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square over the cells that can occur; nothing elsewhere."""
    possible = expected > 0
    assert (observed[~possible] == 0).all()
    degrees = possible.sum() - 1
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < degrees + 10 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("law", ["iid", "swor"])
def test_sampled_growing_loop(backend: str, law: str) -> None:
    """Every node is drawn from the distribution of its path, noise is that of its position and its place in the
    frontier, the tree has a shape fixed in advance.
    """
    model = ToyModel(vocab=12)
    roots = [4, 6, 8]
    params = {"top_k": 9, "temperature": 1.3}
    seeds, positions = torch.tensor([5, -6, 2**62]), torch.tensor([10, 0, 2**33])
    sampled = {"law": law, "params": SamplingParams(**params), "seeds": seeds, "positions": positions}
    levels = [(3, 2), (2, 3), (2, 0)]
    state, _ = model.grow(roots, levels, **sampled)
    assert state.frontier.shape == (3, 0)
    draft = rerank_tree(state, state.num_candidates, active=torch.tensor([True, False, True]))
    assert draft.draft_probs is not None and draft.draft_rows is not None and draft.node_map is not None
    assert draft.draft_probs.shape == (3 * 6, 12) and draft.draft_rows.shape == draft.draft_tokens.shape
    assert ((draft.draft_rows >= 0) & (draft.draft_rows < 18)).all()
    # First draws first: the shape of the tree.
    shape = [-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 6, 6, 5, 5]
    places = {0: 0, 1: 0, 2: 1, 4: 0, 6: 1, 5: 2}  # in their frontiers, of the nodes that have children
    for b, (tokens, parents) in enumerate(packed_trees(draft)):
        if b == 1:
            assert tokens == []
            continue
        assert parents == shape
        begin = int(draft.trees.cu_nodes[b])
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        for node, path in enumerate(paths):
            children = [tokens[i] for i in range(len(tokens)) if parents[i] == node]
            if not children:
                continue
            q = reference.distribution(reference.clean_logits(model.logits(path)), **params)
            np.testing.assert_allclose(draft.draft_probs[draft.draft_rows[begin + node]].cpu().numpy(), q, rtol=1e-5)
            position = int(positions[b]) + len(path) - 1
            expected, margin = expected_children(q, len(children), law, int(seeds[b]), position, places[node])
            assert margin < 1e-5 or children == expected
    # Fewer nodes: the first ones, whatever was drawn.
    fewer = rerank_tree(state, 9)
    assert [parents for _, parents in packed_trees(fewer)] == [shape[:9]] * 3


@pytest.mark.parametrize("law", ["iid", "swor", "coupled"])
def test_draws_of_cousins(backend: str, law: str) -> None:
    """Nodes of one level draw independently, except that they share the noise of the target."""
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


def test_draws_from_poor_rows(backend: str) -> None:
    logits = torch.full((3, 6), -math.inf)
    logits[1, 2] = math.nan
    logits[2, [1, 4]] = 5.0
    seeds, positions = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64)
    state = draw(logits, 4, "swor", seeds, positions)
    assert (state.draft_probs[0][:2] == torch.full((6,), 1 / 6)).all()
    assert all(len(set(tokens)) == 4 for tokens in state.tokens[:2, 1:].tolist())
    assert sorted(state.tokens[2, 1:3].tolist()) == [1, 4] and state.tokens[2, 3:].tolist() == [-1, -1]
    assert state.scores[2, 3:].tolist() == [-math.inf] * 2
    assert draw(logits, 4, "iid", seeds, positions).tokens[2, 1:].sub(1).remainder(3).eq(0).all()
    many = draw(logits, 1024, "iid", seeds, positions)
    assert_distribution(np.bincount(many.tokens[0, 1:].cpu().numpy(), minlength=6).astype(float), np.full(6, 1024 / 6))
    finished = start_draft(torch.tensor([1]), max_kv_nodes=4, active=torch.tensor([False]))
    none = expand_tree(
        finished, torch.zeros(1, 6), num_children=2, num_frontier=2, law="swor", params=SamplingParams(),
        seeds=torch.tensor([0]), positions=torch.tensor([0]),
    )  # fmt: skip
    assert not none.draft_probs[0].any() and none.tokens.tolist() == [[-1, -1, -1]] and not none.level_mask.any()


def test_instruction_sets_agree(row_isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: tokens, scores and distributions."""
    seeds, positions = torch.arange(3), torch.arange(3)

    def results() -> list[Tensor]:
        tensors: list[Tensor] = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for vocab in (37, 2503):
                logits = (torch.randn(3, vocab, generator=seeded(vocab)) * 3).to(dtype)
                grown = expand_tree(start_draft(torch.arange(3), max_kv_nodes=1), logits, num_children=20)
                drawn = [draw(logits, 20, law, seeds, positions, top_p=0.9) for law in ("iid", "swor")]
                for state in (grown, *drawn):
                    tensors += [state.tokens, state.scores, *state.draft_probs]
        return tensors

    mine = results()
    monkeypatch.setenv("PAGEDTREE_CPU_ISA", "portable")
    assert all(a.equal(b) for a, b in zip(mine, results(), strict=True))


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


# Drawn here, verified there ------------------------------------------------------------------------------------------


@slow_on_simt
@pytest.mark.parametrize(
    ("law", "rule"),
    [  # in the core suite each rule once
        pytest.param(law, rule, marks=[] if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, law in enumerate(("iid", "swor"))
        for j, rule in enumerate((verify_rejection, verify_traversal, verify_block))
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_drawn_drafts_are_independent_of_their_verification(
    backend: str, draws: Callable[[int], int], law: str, rule: Callable
) -> None:
    """One seed serves drawing and verifying: what comes out still follows the target."""
    count, vocab, children = draws(40_000), 4, 1 if rule is verify_block else 2
    generator = seeded(6)
    # The last row is for the root.
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
    rest = sample(target[first], sampling, seeds=seeds, positions=positions + 1)
    pairs = np.zeros((vocab, vocab))
    np.add.at(pairs, (first.cpu().numpy(), torch.where(second >= 0, second, rest).cpu().numpy()), 1)
    p = target.softmax(-1).double().cpu().numpy()
    assert_distribution(pairs, count * p[vocab][:, None] * p[:vocab])
    assert 0.2 < float(verdict.num_accepted.float().mean()) < 1.9
