"""What the ops without arithmetic must give, as plain loops over Python lists. Arithmetic is in pagedtree.reference.

Each follows the loop in its op's docstring, and what that says about values out of range.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
Table = Sequence[Sequence[int]]

# Trees ----------------------------------------------------------------------------------------------------------------


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
    """build_trees, one tree whose parents may be anything."""
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
    """int32 [n, words] with these bits."""
    rows = []
    for bits in sets:
        number = sum(1 << bit for bit in bits)
        values = [number >> 32 * word & 0xFFFFFFFF for word in range(words)]
        rows.append([value - (1 << 32) if value >> 31 else value for value in values])
    return torch.tensor(rows, dtype=torch.int32).reshape(len(sets), words)


# Cache and step -------------------------------------------------------------------------------------------------------


def slot_of(table: Table, b: int, position: int, page_size: int) -> int:
    if position < 0 or position // page_size >= len(table[b]):
        return -1
    page = table[b][position // page_size]
    return page * page_size + position % page_size if page >= 0 else -1


def slot_mapping(
    table: Table, seq_lens: Sequence[int], offsets: Sequence[int], page_size: int, total_q: int
) -> list[int]:
    slots = [-1] * total_q
    for b, length in enumerate(seq_lens):
        n = offsets[b + 1] - offsets[b]
        for i in range(n):
            if offsets[b] + i < total_q:
                slots[offsets[b] + i] = slot_of(table, b, length - n + i, page_size)
    return slots


def append_rows(rows: Tensor, cache: Tensor, slots: Sequence[int], scale: Tensor | None) -> None:
    """One side of append_kv; writes `cache`."""
    pages, page_size, heads, _ = cache.shape
    factor = torch.ones(heads) if scale is None else scale.expand(heads)
    for row, slot in zip(rows, slots, strict=True):
        if not 0 <= slot < pages * page_size:
            continue
        if rows.dtype != cache.dtype:
            row = (row.float() / factor[:, None]).clamp(-448, 448).to(cache.dtype)
        cache[slot // page_size, slot % page_size] = row


def compact(
    caches: Sequence[Tensor],
    table: Table,
    start: Sequence[int],
    accept_index: Sequence[Sequence[int]],
    num_accepted: Sequence[int],
) -> list[int]:
    """compact_kv; writes the caches and returns the new lengths."""
    num_pages, page_size = caches[0].shape[:2]
    lengths = []
    for b, nodes in enumerate(accept_index):
        if start[b] < 0 or not nodes or nodes[0] < 0:
            lengths.append(start[b])
            continue
        accepted = min(max(num_accepted[b], 0), len(nodes) - 1)
        lengths.append(min(start[b] + accepted + 1, INT32_MAX))
        moves = []
        for j in range(1, accepted + 1):
            source = slot_of(table, b, start[b] + nodes[j], page_size)
            target = slot_of(table, b, start[b] + j, page_size)
            if nodes[j] >= 0 and 0 <= source < num_pages * page_size and 0 <= target < num_pages * page_size:
                moves.append((source, target))
        for cache in caches:
            rows = [cache[source // page_size, source % page_size].clone() for source, _ in moves]
            for row, (_, target) in zip(rows, moves, strict=True):
                cache[target // page_size, target % page_size] = row
    return lengths


def prepare(
    offsets: Sequence[int], depths: Sequence[int], table: Table, start: Sequence[int], page_size: int, total_q: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """prepare_step: positions, seq_lens, cu_seqlens_q, slots."""
    positions, slots, seq_lens = [0] * total_q, [-1] * total_q, [0] * len(start)
    cut = [min(offset, total_q) for offset in offsets]
    for b, first in enumerate(start):
        if first < 0:
            continue
        seq_lens[b] = min(first + cut[b + 1] - cut[b], INT32_MAX)
        for row in range(cut[b], cut[b + 1]):
            positions[row] = first + max(depths[row], 0)
            slots[row] = slot_of(table, b, first + row - cut[b], page_size)
    return positions, seq_lens, cut, slots


class Committed(NamedTuple):
    start: list[int]
    last_token: list[int]
    finished: list[bool]
    num_accepted: list[int]
    num_tokens: list[int]
    accept_rows: list[list[int]]
    draft_accept_index: list[list[int]]
    draft_num_accepted: list[int]
    draft_missing: list[list[int]]
    draft_num_missing: list[int]


def commit(
    accept_index: Table,
    num_accepted: Sequence[int],
    tokens: Table,
    offsets: Sequence[int],
    start: Sequence[int],
    history: list[list[int]],
    lengths: list[int],
    eos: Table,
    node_map: Sequence[int],
) -> Committed:
    """commit; writes history and lengths. eos: the EOS tokens of each sequence."""
    columns: list[list[Any]] = [[] for _ in Committed._fields]
    for b, nodes in enumerate(accept_index):
        width, size = len(nodes), offsets[b + 1] - offsets[b]

        def padded(values: list[int], width: int = width) -> list[int]:
            return values + [-1] * (width - len(values))

        path: list[int] = []
        emitted: list[int] = []
        ended = False
        if size > 0 and start[b] >= 0 and nodes[0] == 0:
            for j in range(min(max(num_accepted[b], 0), width - 1) + 1):
                if ended or tokens[b][j] < 0 or (j > 0 and not nodes[j - 1] < nodes[j] < size):
                    break
                path.append(nodes[j])
                emitted.append(tokens[b][j])
                ended = tokens[b][j] in eos[b]
        present = path[:1]
        for node in path[1:]:
            if node_map[offsets[b] + node] < 0:
                break
            present.append(node_map[offsets[b] + node])
        lacking = emitted[len(present) - 1 : -1] if path else []
        values = (
            min(start[b] + len(emitted), INT32_MAX),
            emitted[-1] if emitted else -1,
            ended or not emitted,
            max(len(path) - 1, 0),
            len(emitted),
            padded([offsets[b] + node for node in path]),
            padded(present),
            max(len(present) - 1, 0),
            padded(lacking),
            len(lacking),
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        if emitted:
            lengths[b] = min(max(lengths[b], 0), len(history[b]))
            for token in emitted[: len(history[b]) - lengths[b]]:
                history[b][lengths[b]] = token
                lengths[b] += 1
    return Committed(*columns)


# Drafting -------------------------------------------------------------------------------------------------------------


def ngram_tree(
    history: Sequence[int],
    max_nodes: int,
    max_depth: int,
    min_ngram: int = 1,
    max_ngram: int = 4,
    max_branches: int = 8,
    extra: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree that ngram_propose makes of one history."""
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
            same = [i for i in children if tokens[i] == token]
            if same:
                node = same[0]
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
    """The tokens above -inf by falling logit, then id."""
    values = np.array(logits, dtype=np.float64)
    order = np.argsort(-values, kind="stable")  # NaN last
    return [int(x) for x in order if values[x] > -np.inf][:count]


def best_first_tree(log_probs: np.ndarray, tokens: np.ndarray, root: int, num_nodes: int) -> tuple[list, list, list]:
    """Tokens, parents and joint log-probabilities of one sequence's tree, from fp32 [H, K] and int64 [H, K].

    Every child enters the heap.
    """
    chosen: dict[tuple[int, ...], int] = {}
    drafts, parents, joints = [], [], []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    while heap and len(chosen) < num_nodes:
        cost, depth, path = heapq.heappop(heap)
        parents.append(chosen[path[:-1]] if path else -1)
        drafts.append(int(tokens[depth - 1, path[-1]]) if path else root)
        joints.append(-cost)
        chosen[path] = len(chosen)
        with np.errstate(over="ignore", invalid="ignore"):
            costs = np.float32(cost) - np.minimum(log_probs[depth], 0) if depth < len(log_probs) else np.zeros(0)
        for rank in np.flatnonzero(costs < np.inf).tolist():  # NaN is not below
            heapq.heappush(heap, (float(costs[rank]), depth + 1, (*path, rank)))
    return drafts, parents, joints


class Selected(NamedTuple):
    """The rows that are kept, and the parents of each sequence's nodes."""

    rows: list[int]
    parents: list[list[int]]


def select_nodes(
    cu_nodes: Sequence[int], parents: Sequence[int], depths: Sequence[int], survival: Sequence[float], limit: int,
    max_nodes: int, max_depth: int,
) -> Selected:  # fmt: skip
    """select_nodes over trees whose parents and depths may be anything."""
    survives: dict[int, float] = {}
    roots = []
    for begin, end in pairwise(cu_nodes):
        for row in range(begin, min(end, begin + max_nodes)):
            own, parent = survival[row] if survival[row] > 0 else 0.0, begin + parents[row]
            if row == begin:
                roots.append(row)
                survives[row] = own
                continue
            depth = (depths[parent] if begin < parent < row else 0) + 1
            if begin <= parent < row and parent in survives and depths[row] == depth <= max_depth:
                survives[row] = min(own, survives[parent])
    others = sorted(survives.keys() - set(roots), key=lambda row: (-survives[row], row))
    kept = sorted(roots + others[: max(limit - len(roots), 0)])
    links = []
    for begin, end in pairwise(cu_nodes):
        nodes = [row - begin for row in kept if begin <= row < end]
        links.append([nodes.index(parents[begin + node]) if node else -1 for node in nodes])
    return Selected(kept, links)


def pack(trees: Sequence[tuple[list[int], ...]], rows: int) -> tuple[list[int], list[list[int]]]:
    """Offsets, and the columns of all trees one after the other, padded with -1 to `rows`."""
    offsets = [0]
    for tree in trees:
        offsets.append(offsets[-1] + len(tree[0]))
    columns = [[x for tree in trees for x in tree[i]] for i in range(len(trees[0]))]
    return offsets, [column + [-1] * (rows - len(column)) for column in columns]
