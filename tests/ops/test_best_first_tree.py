"""best_first_tree selects the most probable nodes from levels of candidates."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
import torch
from support import seeded
from torch import Tensor

from pagedtree import best_first_tree

pytestmark = pytest.mark.usefixtures("on_device")


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Returns tokens that identify candidates."""
    return torch.arange(math.prod(shape)).reshape(shape) * 3 - 5


def paths(levels: int, width: int) -> list[tuple[int, ...]]:
    return [path for depth in range(1, levels + 1) for path in product(range(width), repeat=depth)]


@pytest.mark.parametrize("num_nodes", [2, 4, 6])
def test_no_other_tree_is_better(backend: str, num_nodes: int) -> None:
    """The tree has the greatest sum of path probabilities of its size, and accepts most on average."""
    levels, width = 3, 2
    log_probs = (torch.randn(1, levels, width, generator=seeded(num_nodes)) * 1.5).log_softmax(-1)
    probability = {path: math.exp(sum(float(log_probs[0, d, r]) for d, r in enumerate(path))) for path in paths(3, 2)}
    best = max(
        sum(probability[path] for path in tree)
        for tree in combinations(probability, num_nodes - 1)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )
    draft_tokens, trees = best_first_tree(
        log_probs, numbered((1, levels, width)), torch.zeros(1, dtype=torch.int64), num_nodes
    )
    rank_of = {(int(token) + 5) // 3 for token in draft_tokens[1:]}
    assert len(rank_of) <= num_nodes - 1
    of_node = [()]
    for node in range(1, num_nodes):
        of_node.append((*of_node[trees.parents[node]], (int(draft_tokens[node]) + 5) // 3 % width))
    assert math.isclose(sum(probability[path] for path in of_node[1:]), best, rel_tol=1e-6)


def nodes_of(log_probs: list[list[float]], num_nodes: int) -> list[tuple[int, ...]]:
    """Returns a tree's nodes as ranks from the root on; levels may differ in width."""
    width = max(map(len, log_probs))
    values = torch.tensor([[level + [math.nan] * (width - len(level)) for level in log_probs]])
    ranks = torch.arange(values.shape[2]).expand(values.shape)
    draft_tokens, trees = best_first_tree(values, ranks.contiguous(), torch.tensor([0]), num_nodes)
    found: list[tuple[int, ...]] = [()]
    for node in range(1, num_nodes):
        if trees.depths[node] >= 0:
            found.append((*found[trees.parents[node]], int(draft_tokens[node])))
    return found


def test_order_and_ties(backend: str) -> None:
    assert nodes_of([[-1.0, -0.5], [-0.25, -2.0]], 5) == [(), (1,), (1, 0), (0,), (0, 0)]
    # Ties: shallower nodes, then lower ranks from the root on.
    assert nodes_of([[-1.0, -1.0], [0.0, 0.0]], 7) == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert nodes_of([[0.0], [0.0], [0.0]], 4) == [(), (0,), (0, 0), (0, 0, 0)]
    # Both are -2 at depth 2: the lower first rank leads, though its parent came later.
    assert nodes_of([[-1.5, -1.0], [-0.5, -1.0]], 6) == [(), (1,), (0,), (1, 0), (0, 0), (1, 1)]
    assert nodes_of([[3.0, math.inf, -0.1]], 4) == [(), (0,), (1,), (2,)]  # clamped to 0


def test_sums_that_round_to_the_same_number_are_ties(backend: str) -> None:
    """-1e-8 is lost after -100: the lower rank leads, not the better candidate."""
    assert nodes_of([[-100.0], [-2e-8, -1e-8, -3e-8]], 5) == [(), (0,), (0, 0), (0, 1), (0, 2)]
    assert nodes_of([[-1e-9], [-2e-8, -1e-8, -3e-8]], 5) == [(), (0,), (0, 1), (0, 0), (0, 2)]
    # Children of different parents tie.
    level = [-(2.0**-26), -(2.0**-27)]
    assert nodes_of([level, [-1.0, -50.0]], 5) == [(), (1,), (0,), (0, 0), (1, 0)]
