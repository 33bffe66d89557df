"""Growing and reranking draft trees against plain loops; the laws of drawn children."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from draft_checks import best_tokens, int32, packed_trees, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedtree import DraftState, SamplingParams, expand_tree, reference, rerank_tree, sample, start_draft
from pagedtree._ops import ops

pytestmark = pytest.mark.usefixtures("on_device")


def mask_sets(mask: Tensor) -> list[set[int]]:
    """The set bits of each mask row."""
    return [
        {32 * w + bit for w, word in enumerate(row) for bit in range(32) if (word >> bit) & 1} for row in mask.tolist()
    ]


# expand_tree ----------------------------------------------------------------------------------------------------------


def check_level(old: DraftState, new: DraftState, logits: Tensor, num_children: int) -> None:
    """Every tensor of `new` from `old` and the logits, in plain loops."""
    width = old.num_frontier * num_children
    assert new.tokens.shape == (old.batch_size, old.num_candidates + width)
    assert new.tokens[:, : old.num_candidates].equal(old.tokens)
    assert new.parents[:, : old.num_candidates].equal(old.parents)
    assert new.scores[:, : old.num_candidates].equal(old.scores)
    old_masks, new_masks = mask_sets(old.mask), mask_sets(new.mask)
    for b in range(old.batch_size):
        kv_index = old.kv_index[b].tolist() + [-1] * width
        for f, parent in enumerate(old.frontier[b].tolist()):
            score = float(old.scores[b, parent])
            row = logits[b * old.num_frontier + f]
            expected = best_tokens(row, num_children) if score > -math.inf else []
            clean = row.double().nan_to_num(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)
            logp = torch.log_softmax(clean, 0)
            if score > -math.inf:
                kv_index[parent] = old.num_kv - old.num_frontier + f
            for k in range(num_children):
                c = old.num_candidates + f * num_children + k
                assert new.parents[b, c] == parent
                if k < len(expected) and score + float(logp[expected[k]]) >= -torch.finfo(torch.float32).max:
                    assert new.tokens[b, c] == expected[k]
                    assert float(new.scores[b, c]) == pytest.approx(
                        score + float(logp[expected[k]]), rel=2e-6, abs=2e-6
                    )
                    assert new.scores[b, c] <= old.scores[b, parent]
                else:
                    assert new.tokens[b, c] == -1 and new.scores[b, c] == -math.inf
        assert new.kv_index[b].tolist() == kv_index
        candidates = range(old.num_candidates, new.num_candidates)
        scores = new.scores[b].tolist()
        assert new.frontier[b].tolist() == sorted(candidates, key=lambda c: (-scores[c], c))[: new.num_frontier]
        for g, c in enumerate(new.frontier[b].tolist()):
            seen = set()
            if scores[c] > -math.inf:
                slot = old.frontier[b].tolist().index(int(new.parents[b, c]))
                seen = old_masks[b * old.num_frontier + slot] | {old.num_kv + g}
            assert new_masks[b * new.num_frontier + g] == seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 1000, 1024, 1025, 5000])
def test_expand(backend: str, dtype: torch.dtype, vocab: int) -> None:
    generator = seeded(vocab)
    state = start_draft(torch.tensor([3, 1, 4]), max_kv_nodes=40)
    for num_children, num_frontier in ((min(4, vocab), min(4, vocab)), (min(10, vocab), min(7, vocab)), (1, 0)):
        rows = state.batch_size * state.num_frontier
        # Quarters: many exact ties, no rounding in any dtype.
        logits = torch.randint(-20, 20, (rows, vocab + 3), generator=generator).div(4).to(dtype)[:, :vocab]
        new = expand_tree(state, logits, num_children=num_children, num_frontier=num_frontier)
        check_level(state, new, logits, num_children)
        state = new
    assert state.level == 3 and state.depths[0].tolist() == sorted(state.depths[0].tolist())


def test_expand_hostile_logits(backend: str) -> None:
    vocab = 130
    rows = torch.zeros(9, vocab)
    rows[0] = math.nan
    rows[1] = -math.inf
    rows[2, 7] = math.inf
    rows[3, 1:] = -math.inf
    rows[4, ::2] = math.nan
    rows[5] = 3e38
    rows[6] = -3e38
    rows[7, 5] = 80.0
    rows[8, [0, 129]] = math.inf
    state = start_draft(torch.arange(9), max_kv_nodes=64)
    new = expand_tree(state, rows, num_children=5, num_frontier=5)
    check_level(state, new, rows, 5)
    assert not new.scores.isnan().any()
    assert not new.level_present[: 2 * 5].any() and new.level_present[15:20].tolist() == [True, *[False] * 4]
    poisoned = torch.full((45, vocab), math.nan)
    poisoned[20:25] = torch.randn(5, vocab)
    last = expand_tree(new, poisoned, num_children=3, num_frontier=15)
    check_level(new, last, poisoned, 3)
    draft = rerank_tree(last, 12)
    assert draft.trees.valid.all()
    assert [len(tokens) for tokens, _ in packed_trees(draft)] == [1, 1, 6, 2, 12, 6, 6, 6, 6]


def test_log_softmax_accuracy(backend: str) -> None:
    logits = torch.randn(4, 100_003, generator=seeded(0)) * 3
    logits[1] -= 1000
    state = expand_tree(start_draft(torch.arange(4), max_kv_nodes=1), logits, num_children=64)
    expected = torch.log_softmax(logits.double(), 1).topk(64).values
    torch.testing.assert_close(state.scores[:, 1:].double(), expected, rtol=1e-6, atol=1e-5)


class ToyModel:
    """Logits of a node are a fixed function of its path's tokens: whoever sees the wrong path sees other logits."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def logits(self, path: list[int]) -> Tensor:
        seed = hash(tuple(path)) % (1 << 31)
        return torch.randn(self.vocab, generator=seeded(seed)) * 2

    def grow(
        self, roots: list[int], levels: list[tuple[int, int]], active: Tensor | None = None, **sampled
    ) -> tuple[DraftState, list[list[int]]]:
        """Grows trees as an engine does; its "KV cache" holds tokens, found through the mask rows only."""
        cache: list[list[int]] = [[] for _ in roots]
        state = start_draft(torch.tensor(roots), max_kv_nodes=1024, active=active)
        for num_children, num_frontier in levels:
            tokens, masks = state.level_tokens.tolist(), mask_sets(state.level_mask)
            assert state.cu_seqlens_q.tolist() == [i * state.num_frontier for i in range(len(roots) + 1)]
            positions = state.level_positions(int32([100 * b for b in range(len(roots))])).tolist()
            logits = torch.full((len(tokens), self.vocab), math.nan)
            for b in range(len(roots)):
                rows = range(b * state.num_frontier, (b + 1) * state.num_frontier)
                cache[b] += [tokens[row] for row in rows]
                assert state.level_tree_lens[b] == len(cache[b])
                for row in rows:
                    if not state.level_present[row]:
                        continue
                    path = [cache[b][kv] for kv in sorted(masks[row])]
                    assert positions[row] == 100 * b + len(path) - 1
                    assert path[-1] == tokens[row]
                    logits[row] = self.logits(path)
            state = expand_tree(state, logits, num_children=num_children, num_frontier=num_frontier, **sampled)
        return state, cache


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


def test_state_without_sequences(backend: str) -> None:
    state = start_draft(torch.empty(0, dtype=torch.int64), max_kv_nodes=33)
    state = expand_tree(state, torch.empty(0, 8), num_children=3, num_frontier=2)
    assert state.level_tokens.shape == (0,) and state.level_mask.shape == (0, 2)
    draft = rerank_tree(state, 4)
    assert draft.draft_tokens.shape == (0,) and draft.trees.cu_nodes.tolist() == [0]


def test_more_than_a_word_of_kv_nodes(backend: str) -> None:
    """Frontiers across mask words, bit 31 included."""
    model = ToyModel(vocab=80)
    state, _ = model.grow([1, 2], [(40, 30), (4, 33), (4, 36), (2, 0)])
    assert state.num_kv == 100
    draft = rerank_tree(state, 300)
    assert draft.trees.valid.all() and draft.trees.max_depth == 4
    assert all(len(tokens) == 300 for tokens, _ in packed_trees(draft))


def test_expand_is_repeatable(backend: str) -> None:
    logits = torch.randn(8, 3000, generator=seeded(1))
    state = start_draft(torch.arange(8), max_kv_nodes=8)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results.append(expand_tree(state, logits, num_children=9, num_frontier=4))
    torch.set_num_threads(threads)
    alone = [expand_tree(start_draft(torch.tensor([b]), max_kv_nodes=8), logits[b : b + 1], num_children=9)
             for b in range(8)]  # fmt: skip
    for result in results:
        assert result.scores.equal(results[0].scores) and result.tokens.equal(results[0].tokens)
        assert result.scores.equal(torch.cat([one.scores for one in alone]))


# Sampled laws ---------------------------------------------------------------------------------------------------------

LAWS = [
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


def expected_children(q: np.ndarray, count: int, law: str, seed: int, position: int) -> tuple[list[int], float]:
    """The draws from law q, and by how much the nearest of them was decided."""
    if law == "swor":
        with np.errstate(divide="ignore"):
            scores = np.log(q) + reference.gumbel_noise(seed, position, q.size, use=reference.DRAFT)
        order = [x for x in np.argsort(-scores, kind="stable") if q[x] > 0]
        margin = min((scores[a] - scores[b] for a, b in pairwise(order[: count + 1])), default=math.inf)
        return order[:count], float(margin)
    words = reference.random_words(seed, position, count, reference.DRAFT).astype(np.float64)
    u = words[:, 0] * 2.0**-32 + words[:, 1] * 2.0**-64
    cdf = np.cumsum(q)
    tokens = np.searchsorted(cdf, u, side="right")
    return [min(int(x), int(np.flatnonzero(q)[-1])) for x in tokens], float(np.abs(cdf[:, None] - u).min())


@pytest.mark.parametrize("law", ["iid", "swor"])
@pytest.mark.parametrize("params", LAWS, ids=str)
def test_draws(backend: str, law: str, params: dict) -> None:
    """Tokens, scores and laws of drawn children, in every dtype and around the vectors' ends."""
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
                q = reference.law(reference.clean_logits(logits[b]), **params)
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


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 3}], ids=str)
def test_joint_law_of_two_draws(backend: str, params: dict) -> None:
    """Ordered pairs against exact enumeration; the target's own noise at the same place is independent of them."""
    count = 60_000
    row = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.4])
    logits = row.expand(count, -1).contiguous()
    seeds, positions = torch.arange(count) * 7919 + 3, torch.arange(count) % 11
    q = reference.law(reference.clean_logits(row), **params)
    for law in ("iid", "swor"):
        state = draw(logits, 2, law, seeds, positions, **params)
        first, second = state.tokens[:, 1].cpu().numpy(), state.tokens[:, 2].cpu().numpy()
        pairs = np.zeros((5, 5))
        np.add.at(pairs, (first, second), 1)
        expected = np.outer(q, q)
        if law == "swor":
            np.fill_diagonal(expected, 0)
            expected /= 1 - q[:, None]
        assert_law(pairs, expected * count)
        target = sample(logits, SamplingParams(**params), seeds=seeds, positions=positions).cpu().numpy()
        joint = np.zeros((5, 5))
        np.add.at(joint, (target, first), 1)
        assert_law(joint, np.outer(q, q) * count)


def assert_law(observed: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square over the cells that can occur; nothing elsewhere."""
    possible = expected > 0
    assert (observed[~possible] == 0).all()
    degrees = possible.sum() - 1
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < degrees + 10 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("law", ["iid", "swor"])
def test_sampled_growing_loop(backend: str, law: str) -> None:
    """Every node's law is that of its path, noise is that of its position, the tree has a shape fixed in advance."""
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
            q = reference.law(reference.clean_logits(model.logits(path)), **params)
            np.testing.assert_allclose(draft.draft_probs[draft.draft_rows[begin + node]].cpu().numpy(), q, rtol=1e-5)
            place = int(positions[b]) + len(path) - 1
            expected, margin = expected_children(q, len(children), law, int(seeds[b]), place)
            assert margin < 1e-5 or children == expected
    # Fewer nodes: the first ones, whatever was drawn.
    fewer = rerank_tree(state, 9)
    assert [parents for _, parents in packed_trees(fewer)] == [shape[:9]] * 3


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
    assert_law(np.bincount(many.tokens[0, 1:].cpu().numpy(), minlength=6).astype(float), np.full(6, 1024 / 6))
    finished = start_draft(torch.tensor([1]), max_kv_nodes=4, active=torch.tensor([False]))
    none = expand_tree(
        finished, torch.zeros(1, 6), num_children=2, num_frontier=2, law="swor", params=SamplingParams(),
        seeds=torch.tensor([0]), positions=torch.tensor([0]),
    )  # fmt: skip
    assert not none.draft_probs[0].any() and none.tokens.tolist() == [[-1, -1, -1]] and not none.level_mask.any()


def test_instruction_sets_agree(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: tokens, scores and laws."""
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


# rerank_tree ----------------------------------------------------------------------------------------------------------


def state_of(parents: list[list[int]], scores: list[list[float]]) -> DraftState:
    batch, count = len(parents), len(parents[0])
    start = start_draft(torch.zeros(batch, dtype=torch.int64), max_kv_nodes=1)
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
        (r"expand_tree: `logits` must be of shape \[2, \*\], got \[3, 8\]", torch.randn(3, 8), {}),
        (r"`logits` must be of dtype Float or Half or BFloat16, got Double", logits.double(), {}),
        (r"`logits` must be contiguous in its last dimension", torch.randn(8, 2).t(), {}),
        (r"`num_children` must be in 1\.\.8, got 9", logits, {"num_children": 9}),
        (r"`num_children` must be in 1\.\.8, got 0", logits, {"num_children": 0}),
        (r"`num_frontier` must be in 0\.\.2, got 3", logits, {"num_frontier": 3}),
        (r"`num_frontier` must be in 0\.\.2, got -1", logits, {"num_frontier": -1}),
    ]:
        with pytest.raises(ValueError, match=match):
            expand_tree(state, bad, **({"num_children": 2} | options))
    with pytest.raises(ValueError, match=r"`num_frontier` must be at most 31 \(max_kv_nodes less those fed\), got 32"):
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
        (r'`law` must be "topk", "iid" or "swor", got "greedy"', {"law": "greedy"}),
        (r'`temperature` must be None under law "topk", got a tensor', sampled),
        (r"`temperature` must be a tensor under this law, got None", sampled | {"law": "iid", "params": None}),
        (r"`seeds` must be a tensor under this law, got None", sampled | {"law": "swor", "seeds": None}),
        (r"`seeds` must be of dtype Long, got Int", sampled | {"law": "swor", "seeds": int32([1, 2])}),
        (r"`positions` must be of shape \[2\], got \[1\]", sampled | {"law": "iid", "positions": torch.tensor([0])}),
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


def test_opcheck(backend: str) -> None:
    state = start_draft(torch.tensor([1, 2]), max_kv_nodes=40)
    fields = (state.tokens, state.parents, state.scores, state.kv_index)
    torch.library.opcheck(
        ops.expand_tree.default,
        (*fields, state.frontier, state.mask, torch.randn(2, 30)),
        {"level": 0, "num_kv": 1, "num_children": 3, "num_frontier": 2},
    )
    torch.library.opcheck(ops.rerank_tree.default, fields, {"num_nodes": 3, "by_score": True})
    sampled = [torch.tensor([value]) for value in (1.0, 0, 0.9, 0.0)]
    sampled[1] = sampled[1].int()
    torch.library.opcheck(
        ops.expand_tree.default,
        (*fields, state.frontier, state.mask, torch.randn(2, 30)),
        {
            "level": 0, "num_kv": 1, "num_children": 3, "num_frontier": 2, "law": "swor",
            **dict(zip(("temperature", "top_k", "top_p", "min_p"), sampled, strict=True)),
            "seeds": torch.tensor([1, 2]), "positions": torch.tensor([3, 4]),
        },
    )  # fmt: skip


def test_compile(backend: str) -> None:
    """A whole drafting phase in one graph."""

    def grow(roots: Tensor, first: Tensor, second: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        state = start_draft(roots, max_kv_nodes=8)
        state = expand_tree(state, first, num_children=4, num_frontier=3)
        level = (state.level_tokens, state.level_positions(start), state.level_mask, state.level_tree_lens)
        draft = rerank_tree(expand_tree(state, second, num_children=4), 6)
        sampled = {"law": "swor", "params": SamplingParams(top_p=0.9), "seeds": roots, "positions": start.long()}
        drawn = rerank_tree(expand_tree(start_draft(roots, max_kv_nodes=8), first, num_children=3, **sampled), 4)
        assert draft.node_map is not None and drawn.draft_probs is not None and drawn.draft_rows is not None
        level = (*level, drawn.draft_tokens, drawn.draft_probs, drawn.draft_rows)
        return (*level, state.cu_seqlens_q, state.level_present, draft.draft_tokens, draft.trees.mask, draft.node_map)

    arguments = (torch.tensor([1, 2]), torch.randn(2, 20), torch.randn(6, 20), int32([5, 9]))
    expected = grow(*arguments)
    compiled = torch.compile(grow, fullgraph=True, backend="aot_eager")(*arguments)
    for mine, eager in zip(compiled, expected, strict=True):
        assert mine.equal(eager)
