"""Limits of drafts: the ends of sequences and of a model's positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pagedtree import Draft, build_trees, select_nodes
from pagedtree.check_draft import as_draft, check_values, rows_of
from pagedtree.generation.drafters.base import Drafter, roots_only
from pagedtree.generation.scheduler import GeneratedSequence


def last_position(sequence: GeneratedSequence, drafter: Drafter) -> int:
    # The last token of a sequence is generated, but never read.
    last, count = sequence.max_length - 2, drafter.num_positions
    # A draft model can read the parent of a node at most at its last position.
    return last if count is None else min(last, count)


def limited(draft: Draft, limits: Tensor) -> tuple[Draft, Tensor]:
    """Returns the nodes at most limits[b] deep, limits int32 [B], all roots, and their rows in `draft`, int32 [N],
    padding last. Device only."""
    trees = draft.trees
    rows = torch.arange(draft.draft_tokens.shape[0], dtype=torch.int32, device=limits.device)
    tree = torch.bucketize(rows, trees.cu_nodes[1:], right=True)
    is_kept = (tree < trees.batch_size) & (trees.depths <= limits[tree.clamp(max=trees.batch_size - 1)])
    part, node_rows = select_nodes(trees, is_kept.float(), len(rows), limit=is_kept.sum(dtype=torch.int32)[None])
    return rows_of(draft, part, node_rows), node_rows


class Question:
    """One call of a drafter for a batch, without nodes that their sequences cannot use.

        for s in sequences:
            tree = drafter.propose(s) if s.root < drafter.num_positions else the root alone
            trees[s] = [node for node in tree if s.root + depth(node) <= last_position(s)]

    tokens, lengths: of the batch, as in `Drafter.propose`.
    """

    def __init__(
        self, drafter: Drafter, sequences: Sequence[GeneratedSequence], tokens: Tensor, lengths: Tensor
    ) -> None:
        count = drafter.num_positions
        self.drafter, self._batch_size, self._texts = drafter, len(sequences), (tokens, lengths)
        # The places of the sequences that the drafter is asked for, and the depth limit of each.
        self._asked = [place for place, s in enumerate(sequences) if count is None or s.root < count]
        asked = [sequences[place] for place in self._asked]
        self._limits = [last_position(sequence, drafter) - sequence.root for sequence in asked]
        self._rows: Tensor | None = None  # of the answer's nodes in the drafter's proposal, -1: none; None: the same
        if not asked:
            return
        if len(asked) < len(sequences):
            places = torch.tensor(self._asked, dtype=torch.int64).to(tokens.device, non_blocking=True)
            self._texts = tokens.index_select(0, places), lengths.index_select(0, places)
        drafter.select(asked)
        drafter.start(*self._texts)

    def answer(self) -> Draft:
        """Returns the trees, checked. draft_rows is set if draft_probs is."""
        device = self._texts[0].device
        if not self._asked:
            return roots_only(self._batch_size, device)
        draft = as_draft(self.drafter.propose(*self._texts), len(self._asked), device)
        if device.type == "cpu":  # elsewhere it would be a synchronisation
            check_values(draft)
        if draft.draft_probs is not None and draft.draft_rows is None:
            draft = draft._replace(draft_rows=torch.arange(len(draft.draft_tokens), device=device, dtype=torch.int64))
        if draft.trees.max_depth > min(self._limits):
            limits = torch.tensor(self._limits, dtype=torch.int32).to(device, non_blocking=True)
            draft, self._rows = limited(draft, limits)
            self.drafter.narrow(draft, self._rows)
        if len(self._asked) < self._batch_size:
            places = {place: i + 1 for i, place in enumerate(self._asked)}
            wanted = [places.get(place, 0) for place in range(self._batch_size)]
            draft, rows = trees_of([roots_only(1, device), draft], wanted)
            self._rows = part_of(self._rows, rows - 1)
        return draft

    def confidence(self) -> Tensor | None:
        """Returns `Drafter.confidence` at the answer's nodes, 0 at roots that the drafter was not asked for."""
        values = self.drafter.confidence() if self._asked else None
        return values if values is None or self._rows is None else values_at(values, self._rows)

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        """Hands on `Drafter.narrow`. rows: int32, of the answer."""
        if self._asked:
            rows = part_of(self._rows, rows)
            if len(self._asked) < self._batch_size:
                draft, own = trees_of([draft], self._asked)
                rows = rows[own]
            self.drafter.narrow(draft, rows.int())


def part_of(rows: Tensor | None, part: Tensor) -> Tensor:
    """Returns rows[part], -1 where `part` is; rows None: the identity."""
    return part if rows is None else torch.where(part < 0, -1, rows[part.clamp(min=0).long()])


def values_at(values: Tensor, rows: Tensor) -> Tensor:
    """Returns values[rows], 0 where a row is -1."""
    rows = rows.to(values.device).long()
    return torch.where(rows < 0, 0.0, values[rows.clamp(min=0, max=len(values) - 1)])


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
