"""Limits of drafts: the ends of sequences and of a model's positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from pagedtree import Draft, build_trees, select_nodes
from pagedtree.check_draft import as_draft, check_values, rows_of
from pagedtree.generation.drafters.base import Drafter, roots_only
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["RowMap", "bounded", "trees_of", "without_padding"]


class RowMap:
    """A map from the rows of a draft to rows of the concatenated proposals: integers [N], -1: none; None: identity."""

    def __init__(self, rows: Tensor | None = None) -> None:
        self._rows = rows

    def part(self, rows: Tensor) -> RowMap:
        """Returns the map for the rows `rows` of the draft, -1 for new ones."""
        if self._rows is None:
            return RowMap(rows)
        return RowMap(torch.where(rows < 0, -1, self._rows[rows.clamp(min=0).long()]))

    def rows(self, first: int = 0) -> Tensor:
        """Returns int32 [N], rows of the drafter whose rows begin at `first`."""
        assert self._rows is not None
        return (self._rows - first).int()

    def values(self, values: Tensor) -> Tensor:
        """Returns the proposals' values [M] at the rows of the draft; 0 for rows of no proposal."""
        if self._rows is None:
            return values
        rows = self._rows.to(values.device).long()
        return torch.where(rows < 0, 0.0, values[rows.clamp(min=0, max=len(values) - 1)])


def bounded(drafter: Drafter) -> Drafter:
    """Returns `drafter` with useless nodes cut from its proposals.

        for s in sequences:
            # A draft model can read the parent of a node at most at its last position.
            tree = drafter.propose(s) if s.root < drafter.num_positions else the root alone
            # The last token of a sequence is generated, but never read.
            last = min(s.max_length - 2, drafter.num_positions)
            trees[s] = [node for node in tree if s.root + depth(node) <= last]

    Its proposals are checked `Draft`s; draft_rows is set if draft_probs is.
    """
    return cast(Drafter, _Bounded(drafter))


class _Bounded:
    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._num_positions = drafter.num_positions
        self._num_selected = 0
        self._asked: list[int] = []  # indices of the selected sequences that the drafter is asked for
        self._limits: list[int] = []  # depth limit of each of these
        self._map = RowMap()  # of the last proposal, to the drafter's own
        self._last: Tensor | None = None  # int32 [sequences + 1], the last positions, for captured steps

    def __getattr__(self, name: str) -> Any:
        if name == "_drafter" or name.startswith("__"):  # requested by copy and pickle
            raise AttributeError(name)
        return getattr(self._drafter, name)

    def select(self, sequences: list[GeneratedSequence], batch_size: int | None = None) -> None:
        if batch_size is not None:
            self._drafter.select(sequences, batch_size)
            return
        count = self._num_positions
        self._num_selected = len(sequences)
        self._asked = [place for place, s in enumerate(sequences) if count is None or s.root < count]
        self._limits = [self._last_of(sequences[place]) - sequences[place].root for place in self._asked]
        if self._asked:
            self._drafter.select([sequences[place] for place in self._asked])

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        if self._asked:
            self._drafter.start(*self._of_asked(tokens, lengths))

    def propose(
        self, tokens: Tensor, lengths: Tensor, active: Tensor | None = None, rows: Tensor | None = None
    ) -> Draft:
        batch, device = tokens.shape[0], tokens.device
        if rows is not None:
            draft = as_draft(self._drafter.propose(tokens, lengths, active, rows), batch, device)
            assert self._last is not None
            return draft if draft.trees.max_depth == 0 else _cut(draft, self._last[rows] - (lengths - 1))[0]
        self._map = RowMap()
        if not self._asked:
            return roots_only(batch, device)
        draft = as_draft(self._drafter.propose(*self._of_asked(tokens, lengths)), len(self._asked), device)
        if device.type == "cpu":  # elsewhere it would be a synchronisation
            check_values(draft)
        if draft.draft_probs is not None and draft.draft_rows is None:
            indices = torch.arange(draft.draft_tokens.shape[0], device=device, dtype=torch.int64)
            draft = draft._replace(draft_rows=indices)
        if draft.trees.max_depth > min(self._limits):
            limits = torch.tensor(self._limits, dtype=torch.int32).to(device, non_blocking=True)
            draft, node_rows = _cut(draft, limits)
            self._map = RowMap(node_rows)
            self._drafter.narrow(draft, node_rows)
        if len(self._asked) < batch:
            places = {place: i + 1 for i, place in enumerate(self._asked)}
            draft, rows = trees_of([roots_only(1, device), draft], [places.get(place, 0) for place in range(batch)])
            self._map = self._map.part(rows - 1)
        return draft

    def confidence(self) -> Tensor | None:
        values = self._drafter.confidence() if self._asked else None
        return None if values is None else self._map.values(values)

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        if not self._asked:
            return
        part = self._map.part(rows)
        if len(self._asked) < self._num_selected:
            draft, node_rows = trees_of([draft], self._asked)
            part = part.part(node_rows)
        self._drafter.narrow(draft, part.rows())

    def capture(self, model: PackedModel, sequences: list[GeneratedSequence], batch_size: int) -> None:
        if self._last is None:
            last = [0] * (max((sequence.index for sequence in sequences), default=-1) + 2)
            for sequence in sequences:
                last[sequence.index] = self._last_of(sequence)
            self._last = torch.tensor(last, dtype=torch.int32).to(model.device)
        self._drafter.capture(model, sequences, batch_size)

    def _last_of(self, sequence: GeneratedSequence) -> int:
        last = sequence.max_length - 2
        return last if self._num_positions is None else min(last, self._num_positions)

    def _of_asked(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if len(self._asked) == tokens.shape[0]:
            return tokens, lengths
        places = torch.tensor(self._asked, dtype=torch.int64).to(tokens.device, non_blocking=True)
        return tokens.index_select(0, places), lengths.index_select(0, places)


def _cut(draft: Draft, limits: Tensor) -> tuple[Draft, Tensor]:
    """Returns the nodes at most limits[b] deep, limits int32 [B], all roots, and their rows in `draft`, int32 [N],
    padding last. Device only."""
    trees = draft.trees
    rows = torch.arange(draft.draft_tokens.shape[0], dtype=torch.int32, device=limits.device)
    tree = torch.bucketize(rows, trees.cu_nodes[1:], right=True)
    is_kept = (tree < trees.batch_size) & (trees.depths <= limits[tree.clamp(max=trees.batch_size - 1)])
    part, node_rows = select_nodes(trees, is_kept.float(), len(rows), limit=is_kept.sum(dtype=torch.int32)[None])
    return rows_of(draft, part, node_rows), node_rows


def trees_of(drafts: Sequence[Draft], wanted: Sequence[int]) -> tuple[Draft, Tensor]:
    """Returns some trees of the concatenated `drafts` as one draft, and its rows there, int64. Synchronises."""
    bounds: list[tuple[int, int]] = []
    before = 0
    for draft in drafts:
        offsets = draft.trees.cu_nodes.tolist()
        bounds += [(before + begin, before + end) for begin, end in pairwise(offsets)]
        before += draft.draft_tokens.shape[0]
    device = drafts[0].draft_tokens.device
    rows = torch.cat([torch.arange(*bounds[b], dtype=torch.int64) for b in wanted]).to(device)
    offsets = [0, *accumulate(bounds[b][1] - bounds[b][0] for b in wanted)]
    probs = [draft.draft_probs for draft in drafts if draft.draft_probs is not None]
    draft_probs = draft_rows = None
    if probs:  # nodes of the other drafts have no sampled children and may use any row
        draft_probs = torch.cat(probs) if len(probs) > 1 else probs[0]
        counts = [0 if draft.draft_probs is None else len(draft.draft_probs) for draft in drafts]
        of_each = [
            d.trees.parents.new_zeros(len(d.draft_tokens)) if d.draft_rows is None else d.draft_rows + before
            for d, before in zip(drafts, accumulate(counts, initial=0), strict=False)
        ]
        draft_rows = torch.cat([part.long() for part in of_each])[rows]
    trees = build_trees(
        torch.cat([draft.trees.parents for draft in drafts])[rows],
        torch.tensor(offsets, dtype=torch.int32).to(device),
        max_nodes=max(draft.trees.max_nodes for draft in drafts),
        max_depth=max(draft.trees.max_depth for draft in drafts),
    )
    tokens = torch.cat([draft.draft_tokens.long() for draft in drafts])[rows]
    return Draft(tokens, trees, draft_probs, draft_rows), rows


def without_padding(draft: Draft) -> Draft:
    """Drops the rows past the last tree on a CPU, where this is free."""
    trees, rows = draft.trees, draft.draft_tokens.shape[0]
    is_plain = trees.max_nodes == 1 and rows == trees.batch_size
    if trees.device.type != "cpu" or is_plain:
        return draft
    ends = trees.cu_nodes[:: trees.batch_size].tolist()  # the first and the last one
    if ends != [0, rows]:
        trees = trees.narrow(0, trees.batch_size)
        rows = trees.parents.shape[0]
        draft_rows = draft.draft_rows[:rows] if draft.draft_rows is not None else None
        draft = draft._replace(draft_tokens=draft.draft_tokens[:rows], trees=trees, draft_rows=draft_rows)
    # Where nobody has a draft, a plain pass is faster.
    if rows == trees.batch_size and int(trees.first_child.max()) < 0:
        return roots_only(rows, trees.device)
    return draft
