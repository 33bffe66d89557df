"""The walk down a tree, and its acceptance rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

__all__ = [
    "acceptance", "block", "branches", "children_of", "excess", "judge_exclusive", "judge_in_turn", "normalised",
    "rejection", "traversal", "typical", "walk", "without",
]  # fmt: skip


def walk(parents: Sequence[int], drafts: Sequence[int], next_token: Callable[[int, int], int]) -> tuple[list, list]:
    """Returns path and tokens of sampled or greedy verification; next_token(node, depth) is the token after `node`."""
    path, tokens = [0], [next_token(0, 0)]
    while True:
        children = [i for i, parent in enumerate(parents) if parent == path[-1] and drafts[i] == tokens[-1] >= 0]
        if not children:
            return path, tokens
        path.append(children[0])
        tokens.append(next_token(path[-1], len(path) - 1))


# Acceptance rules for target p against draft q, in any number type: exact in fractions. p and q hold one list for each
# node; below(entry, bound) returns whether the coin of an entry is below `bound`. Each returns the path and the
# distribution of the bonus.

Row = Sequence[Any]

Below = Callable[[int, Any], bool]


def excess(p: Row, q: Row) -> list:
    return [max(a - b, 0) for a, b in zip(p, q, strict=True)]


def normalised(weights: Row) -> list:
    total = sum(weights)
    return [weight / total for weight in weights] if total else [*weights]


def without(weights: Row, *tokens: int) -> list:
    return [0 if x in tokens else weight for x, weight in enumerate(weights)]


def children_of(parents: Sequence[int], drafts: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node and drafts[child] >= 0]


def judge_in_turn(
    node: int, children: list[int], drafts: Sequence[int], p: Row, q: Row, draft_law: str, below: Below
) -> tuple[int | None, Row]:
    """Returns the accepted child or None, and the residual of p."""
    for child in children:
        x = drafts[child]
        if q[x] > 0 and p[x] > 0 and below(child, p[x] / q[x]):
            return child, p
        p = normalised(excess(p, q))
        if draft_law == "swor":
            q = normalised(without(q, x))
    return None, p


def judge_exclusive(
    node: int, children: list[int], drafts: Sequence[int], p: Row, q: Row, draft_law: str, below: Below
) -> tuple[int | None, Row]:
    tried: list[int] = []
    for child in children:
        if drafts[child] in tried:
            continue
        tried.append(drafts[child])
        if p[tried[-1]] > 0 and below(node, sum(p[x] for x in tried)):
            return child, p
    return None, normalised(without(p, *tried))


def rejection(
    parents: Sequence[int], drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], draft_law: str, below: Below
) -> tuple[list[int], list]:
    judge = judge_exclusive if draft_law == "onehot" else judge_in_turn
    path = [0]
    while True:
        node = path[-1]
        children = children_of(parents, drafts, node)
        child, residual = judge(node, children, drafts, p[node], q[node], draft_law, below)
        if child is None:
            return path, [*residual] if any(residual) else [*p[node]]
        path.append(child)


def acceptance(z: Any, weight: Any) -> Any:
    return z / (z + 1 - weight) if z + 1 - weight else 1


def block(
    parents: Sequence[int], drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], draft_law: str, below: Below
) -> tuple[list[int], list]:
    path, weight, accepted = [0], 1, 0
    masses: list = []
    while True:
        node = path[-1]
        child = next((i for i, parent in enumerate(parents) if parent == node), None)
        x = -1 if child is None else drafts[child]
        distribution = [int(y == x) for y in range(len(p[node]))] if draft_law == "onehot" else q[node]
        residual = [weight * mass for mass in p[node]]
        h = weight
        if x >= 0:
            residual = excess(residual, distribution)
            h = acceptance(sum(residual), weight)
        if node == 0 or below(node, h):
            accepted, masses = len(path), residual if any(residual) else [*p[node]]
        if child is None or x < 0:
            return path[:accepted], normalised(masses)
        weight = min(1, weight * p[node][x] / distribution[x]) if distribution[x] > 0 else 0
        path.append(child)


def traversal(
    parents: Sequence[int], drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], draft_law: str, below: Below
) -> tuple[list[int], list]:
    def verify(node: int, weight: Any) -> tuple[list[int], list] | None:
        residual, draft = p[node], q[node]
        for child in children_of(parents, drafts, node):
            x = drafts[child]
            result = verify(child, min(1, weight * residual[x] / draft[x]) if draft[x] > 0 else 0)
            if result is not None:
                return [node, *result[0]], result[1]
            residual = excess([weight * mass for mass in residual], draft)
            weight = acceptance(sum(residual), weight) if node else 1
            residual = normalised(residual)
            if draft_law == "swor":
                draft = normalised(without(draft, x))
        if node == 0 or below(node, weight):
            return [node], [*residual] if any(residual) else [*p[node]]
        return None

    result = verify(0, 1)
    assert result is not None
    return result


def branches(walk: Callable[[Below], Any]) -> Iterator[tuple[Any, dict[int, tuple], Any]]:
    """Returns every possible outcome of walk(below): its probability, the interval of each coin in it, the result."""
    pending: list[list[bool]] = [[]]
    while pending:
        script = pending.pop()
        intervals: dict[int, tuple] = {}
        answers = iter(script)

        def below(
            entry: int, bound: Any, script: list = script, answers: Iterator = answers, intervals: dict = intervals
        ) -> bool:
            low, high = intervals.get(entry, (0, 1))
            if not low < bound < high:
                return bound >= high
            answer = next(answers, None)
            if answer is None:
                pending.append([*script, False])
                script.append(answer := True)
            intervals[entry] = (low, bound) if answer else (bound, high)
            return answer

        result = walk(below)
        yield math.prod(high - low for low, high in intervals.values()), intervals, result


def typical(parents: Sequence[int], drafts: Sequence[int], p: np.ndarray, epsilon: float, delta: float) -> list[int]:
    """Returns the path of `pagedtree.verify_typical`."""
    paths = {0: [0]}
    for node, parent in enumerate(parents):
        if node == 0 or parent not in paths or drafts[node] < 0:
            continue
        distribution = p[parent]
        entropy = -sum(float(mass) * math.log(mass) for mass in distribution if mass > 0)
        if distribution[drafts[node]] > min(epsilon, delta * math.exp(-entropy)):
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=lambda path: (len(path), -path[-1]))
