"""Inputs of a step's target pass, and the commit after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pagedtree.reference.kv_cache import INT32_MAX, Table, slot_of


def prepare(
    offsets: Sequence[int], depths: Sequence[int], table: Table, start: Sequence[int], page_size: int, total_q: int
) -> tuple[list[int], list[int], list[int], list[int]]:
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
    tokens_left: Sequence[int] | None = None,
    history_rows: Sequence[int] | None = None,
) -> Committed:
    """Commits as `commit`; writes history and lengths. eos: the EOS tokens of each sequence."""
    columns: list[list[Any]] = [[] for _ in Committed._fields]
    for b, nodes in enumerate(accept_index):
        width, size = len(nodes), offsets[b + 1] - offsets[b]

        def padded(values: list[int], width: int = width) -> list[int]:
            return values + [-1] * (width - len(values))

        path: list[int] = []
        emitted: list[int] = []
        limit = INT32_MAX if tokens_left is None else tokens_left[b]
        ended = limit <= 0
        if size > 0 and start[b] >= 0 and nodes[0] == 0:
            for j in range(min(max(num_accepted[b], 0), width - 1) + 1):
                if ended or tokens[b][j] < 0 or (j > 0 and not nodes[j - 1] < nodes[j] < size):
                    break
                path.append(nodes[j])
                emitted.append(tokens[b][j])
                ended = tokens[b][j] in eos[b] or len(path) == limit
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
        row = b if history_rows is None else history_rows[b]
        if emitted and 0 <= row < len(history):
            lengths[row] = min(max(lengths[row], 0), len(history[row]))
            for token in emitted[: len(history[row]) - lengths[row]]:
                history[row][lengths[row]] = token
                lengths[row] += 1
    return Committed(*columns)
