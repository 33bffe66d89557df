"""Draft trees: grown, proposed and selected."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


def ngram_tree(
    history: Sequence[int],
    max_nodes: int,
    max_depth: int,
    min_ngram: int = 1,
    max_ngram: int = 4,
    max_branches: int = 8,
    extra: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    if not history:
        return [], []
    tokens, parents = [history[-1]], [-1]
    leaves = 0

    def insert(continuation: Sequence[int]) -> None:
        nonlocal leaves
        node = 0
        for token in continuation:
            if token < 0:
                return
            children = [i for i, parent in enumerate(parents) if parent == node]
            matches = [i for i in children if tokens[i] == token]
            if matches:
                node = matches[0]
                continue
            branches = node == 0 or bool(children)
            if len(tokens) == max_nodes or (branches and leaves == max_branches):
                return
            leaves += branches
            tokens.append(token)
            parents.append(node)
            node = len(tokens) - 1

    def agreement(text: Sequence[int], end: int) -> int:
        n = 0
        while n < max_ngram and n < end and n < len(history) and text[end - 1 - n] == history[-1 - n] >= 0:
            n += 1
        return n

    places = [(text, end, agreement(text, end)) for text in (history, extra) for end in range(len(text) - 1, 0, -1)]
    for n in range(max_ngram, min_ngram - 1, -1):
        for text, end, agreed in places:
            if agreed == n:
                insert(text[end : end + max_depth])
    return tokens, parents


def best_tokens(logits: Sequence[float], count: int) -> list[int]:
    """Returns the tokens above -inf by descending logit, then id."""
    values = np.array(logits, dtype=np.float64)
    order = np.argsort(-values, kind="stable")  # NaN last
    return [int(x) for x in order if values[x] > -np.inf][:count]


def best_first_tree(log_probs: np.ndarray, tokens: np.ndarray, root: int, num_nodes: int) -> tuple[list, list, list]:
    """Returns tokens, parents and joint log-probabilities of one sequence's tree, from fp32 [H, K] and int64 [H, K].

    Every child enters the heap.
    """
    nodes: dict[tuple[int, ...], int] = {}
    drafts, parents, joints = [], [], []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    while heap and len(nodes) < num_nodes:
        cost, depth, path = heapq.heappop(heap)
        parents.append(nodes[path[:-1]] if path else -1)
        drafts.append(int(tokens[depth - 1, path[-1]]) if path else root)
        joints.append(-cost)
        nodes[path] = len(nodes)
        with np.errstate(over="ignore", invalid="ignore"):
            costs = np.float32(cost) - np.minimum(log_probs[depth], 0) if depth < len(log_probs) else np.zeros(0)
        for rank in np.flatnonzero(costs < np.inf).tolist():  # NaN is not below
            heapq.heappush(heap, (float(costs[rank]), depth + 1, (*path, rank)))
    return drafts, parents, joints


class Selected(NamedTuple):
    """The kept rows, and the parents of each sequence's nodes."""

    rows: list[int]
    parents: list[list[int]]


def select_nodes(
    cu_nodes: Sequence[int], parents: Sequence[int], depths: Sequence[int], survival: Sequence[float], limit: int,
    max_nodes: int, max_depth: int,
) -> Selected:  # fmt: skip
    survives: dict[int, float] = {}
    roots = []
    for begin, end in pairwise(cu_nodes):
        for row in range(begin, min(end, begin + max_nodes)):
            chance, parent = survival[row] if survival[row] > 0 else 0.0, begin + parents[row]
            if row == begin:
                roots.append(row)
                survives[row] = chance
                continue
            depth = (depths[parent] if begin < parent < row else 0) + 1
            if begin <= parent < row and parent in survives and depths[row] == depth <= max_depth:
                survives[row] = min(chance, survives[parent])
    candidates = sorted(survives.keys() - set(roots), key=lambda row: (-survives[row], row))
    kept_rows = sorted(roots + candidates[: max(limit - len(roots), 0)])
    links = []
    for begin, end in pairwise(cu_nodes):
        nodes = [row - begin for row in kept_rows if begin <= row < end]
        links.append([nodes.index(parents[begin + node]) if node else -1 for node in nodes])
    return Selected(kept_rows, links)
