"""What drafted nodes are worth: their chance to be accepted, and what tokens of each sequence count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedtree import Draft, DraftTree, TreeBatch
from pagedtree.generation.batch_progress import BatchProgress
from pagedtree.generation.node_budget import NodeBudget, best_count


@pytest.mark.parametrize("has_confidence", [False, True])
def test_guesses_count_whether_verified_or_not(has_confidence):
    """Each child of an accepted node was right or wrong; of the nodes below the others nothing is known."""
    trees = TreeBatch.from_trees([DraftTree([-1, 0, 0, 1, 3]), DraftTree.chain(2)])
    tokens = torch.tensor([0, 11, 12, 13, 14, 0, 21, 22])
    confidence = torch.tensor([0.0, -0.1, -1.0, -0.2, -0.3, 0.0, -0.1, -0.2]) if has_confidence else None
    budget = NodeBudget()
    before = budget.survival(trees, confidence, [5, 7])
    places, likelihoods = (np.array(x) for x in (budget._native.by_place, budget._native.by_likelihood))
    # Verified: the first tree's root and its first child, which was wrong, and the second tree's root.
    accepted, came = torch.tensor([[0, -1], [0, -1]]), torch.tensor([[12, -1], [21, -1]])
    compared = budget.observe(Draft(tokens, trees), torch.tensor([0, 1, 5, -1]), accepted, came)
    assert [counts.tolist() for counts in compared] == [[2, 1], [1, 1]]
    places = (budget._native.by_place - places).round(6)
    assert places[:2].tolist() == [[1.0, 2.0], [1.0, 1.0]] and not places[2:].any()  # the roots' children, of two ranks
    likelihoods = (budget._native.by_likelihood - likelihoods).round(6)
    assert likelihoods.sum(axis=0).tolist() == ([2.0, 3.0] if has_confidence else [0.0, 0.0])
    assert budget._native.of_sequences[7][0] == 1.0
    assert budget._native.of_sequences[7][1] == pytest.approx(before[6], abs=0.05)


def survival_by_loops(budget, trees, confidence, sequences):
    """As the docstring of `NodeBudget` says, from what the budget has counted."""
    rates = np.array(budget._native.by_place).reshape(8, 4, 2)
    rates = rates[..., 0] / rates[..., 1]
    rates = np.minimum.accumulate(rates / np.maximum(rates.sum(axis=1, keepdims=True), 1.0), axis=1)
    of_bin = [right / tried for right, tried in budget._native.by_likelihood]
    edges, expected = [0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 1.7, 2.3, 3.0, 4.0, 6.0], []
    for b, sequence in enumerate(sequences):
        begin, end = trees.cu_nodes[b : b + 2].tolist()
        hits, hoped = budget._native.of_sequences.get(sequence, (0.0, 0.0))
        children, depth, alive = dict.fromkeys(range(end - begin), 0), {}, {}
        for node in range(end - begin):
            parent = int(trees.parents[begin + node])
            if parent < 0:
                depth[node], alive[node] = 0, 1.0
                continue
            depth[node], rank = depth[parent] + 1, children[parent]
            children[parent] += 1
            if confidence is None:
                rate = rates[min(depth[node], 8) - 1, min(rank, 3)]
            else:
                rate = of_bin[np.searchsorted(edges, float(confidence[begin + parent] - confidence[begin + node]))]
            alive[node] = alive[parent] * np.clip(rate * (hits + 2) / (hoped + 2), 1e-6, 0.97)
        expected += [alive[node] for node in range(end - begin)]
    return expected


@pytest.mark.parametrize("has_confidence", [False, True])
def test_survival_is_that_of_loops(has_confidence):
    """Deep and wide trees, roots alone, padding behind the last tree, and evidence from several steps."""
    rng, budget = np.random.default_rng(0), NodeBudget()
    for _ in range(6):
        parents = [np.array([-1, *(rng.integers(node) for node in range(1, size))]) for size in (1, 30, 7, 2)]
        trees = TreeBatch.from_trees([*map(DraftTree, parents), DraftTree.chain(12)])
        steps = torch.zeros(len(trees.parents))
        for row, parent in enumerate(trees.parents.tolist()):
            if parent >= 0:
                first = int(trees.cu_nodes[int((trees.cu_nodes <= row).sum()) - 1])
                steps[row] = steps[first + parent] - float(rng.exponential(1.5))
        confidence = steps if has_confidence else None
        found = budget.survival(trees, confidence, range(5))
        np.testing.assert_allclose(found, survival_by_loops(budget, trees, confidence, range(5)), rtol=1e-6)
        tokens = torch.from_numpy(rng.integers(3, size=len(found)))
        came = torch.from_numpy(rng.integers(3, size=(5, 1)))
        budget.observe(Draft(tokens, trees), None, torch.zeros(5, 1, dtype=torch.int32), came)


def test_hostile_trees_do_not_lead_out_of_the_arrays():
    native, sequences = NodeBudget()._native, np.arange(1)
    offsets, parents = np.array([0, 3], dtype=np.int32), np.array([-1, 2_000_000_000, 5], dtype=np.int32)
    assert native.survival(offsets, parents, None, sequences).tolist() == [1.0, 1.0, 1.0]
    rows, node = np.array([7, -3, 1], dtype=np.int32), np.array([[9]], dtype=np.int32)
    native.observe(np.arange(3), rows, node, np.array([[1]]))
    for bad in ([0, 4], [1, 3], [0, -1]):
        with pytest.raises(ValueError, match="offsets"):
            native.survival(np.array(bad, dtype=np.int32), parents, None, sequences)
    with pytest.raises(ValueError, match="survival"):
        native.observe(np.arange(3), None, node, np.array([[1]]))
    with pytest.raises(ValueError, match="sequences"):
        native.survival(offsets, parents, None, np.arange(2))


def test_best_count_is_that_of_loops():
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_trees, size = int(rng.integers(1, 5)), int(rng.integers(5, 40))
        is_draft = rng.permutation(np.arange(size) >= num_trees)
        worth = np.where(is_draft, rng.random(size) * rng.random(), 1.0 / num_trees)
        fixed, row = 1.0 + rng.random(), float(rng.choice([0.0, 0.02, 0.2]))
        drafts = sorted(worth[is_draft], reverse=True)
        rates = [(1.0 + sum(drafts[:count])) / (fixed + row * count) for count in range(len(drafts) + 1)]
        assert rates[best_count(worth, is_draft, fixed, row) - num_trees] == pytest.approx(max(rates))
    assert best_count(np.ones(3), np.zeros(3, dtype=bool), 1.0, 0.1) == 3
    with pytest.raises(ValueError, match="is_draft"):
        best_count(np.ones(3), np.zeros(2, dtype=bool), 1.0, 0.1)


@pytest.mark.parametrize("others_wait", [False, True])
def test_progress_is_that_of_the_last_sequences(others_wait):
    far, near = BatchProgress([10, 30, 40], others_wait, 0.02), BatchProgress([8, 8], others_wait, 0.02)
    assert far.counts == [others_wait, True, True] and near.counts == [True, True]
    weights = [1 / 3] * 3 if others_wait else [0.02, 0.49, 0.49]
    assert far.weights == pytest.approx(weights) and near.weights == pytest.approx([0.5, 0.5])
    found = [1, 5, 2]
    # The last one was 40 tokens from its end, and is 38.
    of_all, of_last = float(np.dot(weights, found)), 2.0
    assert far.made(found) == pytest.approx(of_all if others_wait else of_last + (of_all - of_last) / 3)
    assert near.made([1, 1]) == pytest.approx(1.0)
    assert far.expected(0.4) == pytest.approx(1.4 if others_wait else 1.2)
    assert BatchProgress([8], others_wait, 0.02).expected(0.4) == pytest.approx(1.4)
