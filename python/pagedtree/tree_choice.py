"""Chooses the draft tree with the best rate: expected tokens per step over the step's cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pagedtree._arguments import checked, refusal
from pagedtree.tree import MAX_NODES, DraftTree

__all__ = ["choose_tree", "expected_tokens"]


@checked(own=("acceptance", "step_cost"))
def choose_tree(
    acceptance: Sequence[float] | Sequence[Sequence[float]] | np.ndarray,
    step_cost: Callable[[int], float],
    *,
    max_nodes: int = 64,
    max_depth: int = 16,
    level_cost: float = 0.0,
) -> DraftTree:
    """Returns the tree with the most expected tokens per second; the root alone where drafting does not pay.

    Source: Sequoia (Chen et al., NeurIPS 2024): dynamic programming finds the best tree of each size; the step cost
    decides the size.

    Args:
        acceptance: probability that the child of each rank is accepted if its parent was, [R]: rank 0 is the drafter's
            first choice. Or [D, R], one row per depth, the root's children first; then D bounds the depth. A row sums
            to at most 1.
        step_cost: seconds of a step in which the target verifies a tree of that many nodes, the root included. A size
            counts as at least as expensive as any smaller size.
        max_nodes: most nodes, the root included, 1..1024.
        max_depth: most levels below the root.
        level_cost: additional seconds per level.

    Nodes are in depth order; children are the drafter's first choices, best first.

        for tree in trees_of_at_most(max_nodes, max_depth, R):
            rate = expected_tokens(tree, acceptance) / (step_cost(tree.num_nodes) + level_cost * tree.max_depth)
        return the tree of the greatest rate, the smallest one if several have it

    Raises ValueError for probabilities outside 0..1 or rows that sum to more than 1, wrong bounds, and a cost that is
    not positive and finite; TypeError for wrong types.
    """
    levels = _levels(acceptance, min(max_depth, MAX_NODES))
    if not callable(step_cost):
        raise refusal("step_cost", "a function of the number of nodes", type(step_cost).__name__, TypeError)
    if not 1 <= max_nodes <= MAX_NODES:
        raise refusal("max_nodes", f"1 to {MAX_NODES}", max_nodes)
    if not 0 <= level_cost < np.inf:
        raise refusal("level_cost", "a finite number of at least 0", level_cost)
    costs = np.array([step_cost(size) for size in range(1, max_nodes + 1)], dtype=np.float64)
    if not (np.isfinite(costs) & (costs > 0)).all():
        size = int(np.argmin(np.isfinite(costs) & (costs > 0))) + 1
        raise refusal("step_cost", "a positive, finite number", f"{costs[size - 1]} for {size} nodes")
    bound = max(max_nodes - 1, 1)  # levels, and children of a node
    levels = levels[:bound, :bound]
    return DraftTree(_best_parents(levels, np.maximum.accumulate(costs), level_cost))


@checked(own=("acceptance",))
def expected_tokens(tree: DraftTree, acceptance: Sequence[float] | Sequence[Sequence[float]] | np.ndarray) -> float:
    """Returns the expected tokens per step with this tree: the accepted drafts and the bonus token.

    acceptance: as for `choose_tree`; ranks and depths outside it are never accepted.

        reached[0] = 1
        for node in 1..num_nodes - 1:
            reached[node] = reached[parent] * acceptance[depth - 1][child_rank]
        return sum(reached)

    Raises ValueError for probabilities outside 0..1 or rows that sum to more than 1.
    """
    levels = _levels(acceptance, max(tree.max_depth, 1)).tolist()
    probabilities = [1.0]
    nodes = zip(tree.parents.tolist(), tree.depths.tolist(), tree.child_ranks.tolist(), strict=True)
    next(nodes)
    for parent, depth, rank in nodes:
        has_entry = depth <= len(levels) and rank < len(levels[0])
        probabilities.append(probabilities[parent] * levels[depth - 1][rank] if has_entry else 0.0)
    return float(sum(probabilities))


def _best_parents(levels: np.ndarray, costs: np.ndarray, level_cost: float) -> list[int]:
    """Returns the best tree's parents, level by level."""
    best_rate, parents = 1.0 / costs[0], [-1]
    # The depth matters only if levels cost something.
    for depth in range(1 if level_cost > 0.0 else len(levels), len(levels) + 1):
        tokens, choices = _search(levels[:depth], len(costs))
        size = 1
        for n, seconds in enumerate(costs[1:] + level_cost * depth, start=2):
            if (rate := tokens[n] / seconds) > best_rate * (1.0 + 1e-12):
                best_rate, size = rate, n
        if size > 1:
            parents = _parents(choices, size)
    return parents


def _search(levels: np.ndarray, max_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the expected tokens of the best tree with at most n nodes, [max_nodes + 1]; and how many of n nodes below
    a node of a level are under its child of a rank, [D, R, max_nodes + 1]."""
    subtree = np.ones(max_nodes + 1)  # expected tokens of n nodes under an accepted root at this level
    subtree[0] = 0.0
    choices = np.zeros((*levels.shape, max_nodes + 1), dtype=np.int64)
    for level in reversed(range(len(levels))):
        forest = np.zeros(max_nodes + 1)  # of n nodes below such a node, among children of this rank and up
        for rank in reversed(range(levels.shape[1])):
            # k nodes for this child, the rest for later ranks, which exist only with this child.
            rest = sliding_window_view(np.concatenate([np.full(max_nodes, -np.inf), forest]), max_nodes + 1)[:, ::-1]
            values = levels[level, rank] * subtree + rest
            values[:, 0] = 0.0
            choices[level, rank] = values.argmax(axis=1)
            forest = values.max(axis=1)
        subtree[1:] = 1.0 + forest[:-1]
    return subtree, choices


def _parents(choices: np.ndarray, size: int) -> list[int]:
    parents, level = [-1], [(0, size - 1)]  # nodes, numbers of descendants
    for of_level in choices:
        below = []
        for node, left in level:
            for of_rank in of_level:
                if (count := int(of_rank[left])) == 0:
                    break
                below.append((len(parents), count - 1))
                parents.append(node)
                left -= count
        level = below
    return parents


def _levels(acceptance: Sequence[float] | Sequence[Sequence[float]] | np.ndarray, max_depth: int) -> np.ndarray:
    if max_depth < 1:
        raise refusal("max_depth", "at least 1", max_depth)
    try:
        if isinstance(acceptance, (str, bytes)):
            raise TypeError
        levels = np.asarray(acceptance, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise refusal("acceptance", "probabilities [R] or [D, R]", f"{acceptance!r:.80}", type(error)) from None
    if levels.ndim == 1:
        levels = np.tile(levels, (max_depth, 1))
    if levels.ndim != 2 or 0 in levels.shape:
        raise refusal("acceptance", "probabilities [R] or [D, R]", f"shape {list(levels.shape)}")
    bad = ~(levels >= 0).all(axis=1) | (levels.sum(axis=1) > 1 + 1e-6)
    if bad.any():
        row = int(bad.argmax())
        raise refusal(
            "acceptance", "probabilities that sum to at most 1 per row", f"{levels[row].tolist()!s:.80}, row {row}"
        )
    return levels[:max_depth]
