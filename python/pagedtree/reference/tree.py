"""The links, depths and masks of trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """A node: depth, first child, next sibling, and the nodes that it sees."""

    depth: int
    first_child: int
    next_sibling: int
    visible: frozenset[int]


class Linked(NamedTuple):
    rows: list[Row]
    valid: bool


PADDING = Row(-1, -1, -1, frozenset())


def link(parents: Sequence[int], max_nodes: int, max_depth: int) -> Linked:
    """Links one tree as build_trees; its parents may be anything."""
    depths: list[int] = []
    visible: list[frozenset[int]] = []
    valid = 1 <= len(parents) <= max_nodes
    for i, parent in enumerate(parents):
        if i == 0:
            depths.append(0)
            visible.append(frozenset({0}))
            valid = valid and parent == -1
        elif i < max_nodes and 0 <= parent < i and 0 <= depths[parent] < max_depth:
            depths.append(depths[parent] + 1)
            visible.append(visible[parent] | {i})
        else:
            depths.append(-1)
            visible.append(frozenset())
            valid = False
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    newest: dict[int, int] = {}
    for i in range(1, len(parents)):
        if depths[i] < 0:
            continue
        if parents[i] in newest:
            next_sibling[newest[parents[i]]] = i
        else:
            first_child[parents[i]] = i
        newest[parents[i]] = i
    return Linked([Row(*row) for row in zip(depths, first_child, next_sibling, visible, strict=True)], valid)


def words_of(sets: Sequence[frozenset[int]], words: int) -> Tensor:
    rows = []
    for bits in sets:
        number = sum(1 << bit for bit in bits)
        values = [number >> 32 * word & 0xFFFFFFFF for word in range(words)]
        rows.append([value - (1 << 32) if value >> 31 else value for value in values])
    return torch.tensor(rows, dtype=torch.int32).reshape(len(sets), words)


def pack(trees: Sequence[tuple[list[int], ...]], rows: int) -> tuple[list[int], list[list[int]]]:
    """Returns offsets, and the columns of all trees one after the other, padded with -1 to `rows`."""
    offsets = [0]
    for tree in trees:
        offsets.append(offsets[-1] + len(tree[0]))
    columns = [[x for tree in trees for x in tree[i]] for i in range(len(trees[0]))]
    return offsets, [column + [-1] * (rows - len(column)) for column in columns]
