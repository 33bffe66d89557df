"""`choose_tree` against all trees of small sizes, and its refusals."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedtree import DraftTree, choose_tree, expected_tokens


@cache
def all_forests(num_nodes: int, depth: int, rank: int, num_ranks: int) -> list[tuple]:
    """Forests are nested tuples; children have ranks from `rank`."""
    if num_nodes == 0:
        return [()]
    if depth == 0 or rank == num_ranks:
        return []
    return [
        (child, *siblings)
        for size in range(1, num_nodes + 1)
        for child in all_forests(size - 1, depth - 1, 0, num_ranks)
        for siblings in all_forests(num_nodes - size, depth, rank + 1, num_ranks)
    ]


def parents_of(forest: tuple) -> list[int]:
    parents, queue = [-1], [(0, forest)]
    for node, children in queue:
        for child in children:
            parents.append(node)
            queue.append((len(parents) - 1, child))
    return parents


def rate(tree: DraftTree, acceptance, costs, level_cost) -> float:
    return expected_tokens(tree, acceptance) / (costs[tree.num_nodes - 1] + level_cost * tree.max_depth)


@st.composite
def problems(draw):
    depth, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    unit = st.floats(0, 1, allow_subnormal=False)
    levels = np.array([[draw(unit) for _ in range(ranks)] for _ in range(depth)])
    levels /= np.maximum(levels.sum(axis=1, keepdims=True), 1.0)  # ranks in any order
    costs = sorted(draw(st.floats(0.1, 2.0)) for _ in range(6))
    return levels, costs, draw(st.sampled_from([0.0, 0.2, 1.0]))


@settings(max_examples=80, deadline=None)
@given(problems())
def test_no_tree_has_a_higher_rate(problem):
    levels, costs, level_cost = problem
    tree = choose_tree(levels, lambda n: costs[n - 1], max_nodes=6, level_cost=level_cost)
    rates = [
        rate(DraftTree(parents_of(forest)), levels, costs, level_cost)
        for size in range(6)
        for forest in all_forests(size, len(levels), 0, levels.shape[1])
    ]
    assert rate(tree, levels, costs, level_cost) == pytest.approx(max(rates), rel=1e-9)


def test_every_depth_takes_the_same_row_of_one():
    tree = choose_tree([0.6, 0.2], lambda n: 1.0, max_nodes=40, max_depth=5)
    assert tree.num_nodes == 40 and tree.max_depth == 5
    assert expected_tokens(tree, [0.6, 0.2]) == pytest.approx(expected_tokens(tree, [[0.6, 0.2]] * 5))


def test_a_size_costs_at_least_as_much_as_the_smaller_ones():
    tree = choose_tree([0.5], lambda n: 0.1 if n == 3 else 2.0, max_nodes=4)
    assert tree.parents.tolist() == [-1, 0, 1, 2]


def test_expected_tokens_of_a_tree():
    tree = DraftTree.from_paths([[0], [1], [0, 0], [2]])
    assert expected_tokens(tree, [[0.5, 0.25], [0.4, 0.1]]) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.4)
    assert expected_tokens(DraftTree.chain(0), [0.5]) == 1.0
    assert expected_tokens(DraftTree.chain(3), [0.5]) == pytest.approx(1.875)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(acceptance=[]), r"acceptance: expected probabilities \[R\] or \[D, R\], got shape"),
        (dict(acceptance=[0.5, 1.5]), "acceptance: expected probabilities that sum to at most 1 per row, got"),
        (dict(acceptance=[0.6, 0.6]), "acceptance: expected probabilities that sum to at most 1 per row, got"),
        (dict(acceptance=[float("nan")]), "acceptance: expected probabilities that sum to at most 1 per row, got"),
        (dict(max_nodes=0), "max_nodes: expected 1 to 1024, got 0"),
        (dict(max_nodes=1025), "max_nodes: expected 1 to 1024, got 1025"),
        (dict(max_depth=0), "max_depth: expected at least 1, got 0"),
        (dict(level_cost=-1.0), "level_cost: expected a finite number of at least 0, got -1.0"),
        (dict(step_cost=lambda n: 2.0 - n), "step_cost: expected a positive, finite number, got 0.0 for 2 nodes"),
        (dict(step_cost=lambda n: float("nan")), "step_cost: expected a positive, finite number, got nan for 1 nodes"),
    ],
)
def test_refusals(change, message):
    arguments = {"acceptance": [0.5], "step_cost": lambda n: 1.0} | change
    with pytest.raises(ValueError, match=message):
        choose_tree(arguments.pop("acceptance"), arguments.pop("step_cost"), **arguments)
