"""The drafters' parts in a decode step of fixed shape (`fixed_step`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagedtree import Draft, DraftTree, TreeBatch, compact_kv, medusa_propose, ngram_propose, slot_mapping
from pagedtree.generation.drafters.base import Drafter, NoDrafter, StepResult
from pagedtree.generation.drafters.medusa import MedusaDrafter
from pagedtree.generation.drafters.model import ModelDrafter
from pagedtree.generation.drafters.ngram import NgramDrafter
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["FixedDrafter", "Mirror", "check_fixed", "fixed_drafter"]


class Mirror:
    """A device tensor that follows values of the host: it is written where they differ from what it holds."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: int = 0) -> None:
        self.tensor = torch.full(shape, fill, dtype=dtype, device=device)
        self._host = torch.full(shape, fill, dtype=dtype)
        self._fill = fill
        self._values: list[Any] = []

    def set(self, values: list[Any]) -> None:
        """Values of the first rows (numbers, or lists that may be shorter than a row); the others get the fill."""
        if values == self._values:
            return
        self._host.fill_(self._fill)
        for row, value in enumerate(values):
            if isinstance(value, list):
                self._host[row, : len(value)] = torch.tensor(value, dtype=self._host.dtype)
            else:
                self._host[row] = value
        self.tensor.copy_(self._host)
        self.known(values)

    def known(self, values: list[Any]) -> None:
        """The device has written these itself."""
        self._values = [list(value) if isinstance(value, list) else value for value in values]


class FixedDrafter:
    """Drafts for rows of which some are idle. `load` and `advance` run on the host, before and after a step; `propose`
    and `observe` on the device alone.
    """

    def __init__(
        self,
        drafter: Any,
        model: PackedModel,
        batch_size: int,
        sequences: Sequence[GeneratedSequence],
        sampling: Sampling,
    ) -> None:
        self.drafter, self.batch_size, self.sampling = drafter, batch_size, sampling

    def load(self, sequences: list[GeneratedSequence]) -> None:
        """What the first rows stand for."""

    def propose(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        """tokens [B, capacity], lengths [B], active [B] and the sequences' numbers rows [B]."""
        raise NotImplementedError

    def observe(self, result: StepResult, active: Tensor) -> None:
        """What became of the drafts."""

    def advance(self, sequences: list[GeneratedSequence]) -> None:
        """The sequences have got the step's tokens."""


class FixedRoots(FixedDrafter):
    def __init__(
        self,
        drafter: NoDrafter,
        model: PackedModel,
        batch_size: int,
        sequences: Sequence[GeneratedSequence],
        sampling: Sampling,
    ) -> None:
        super().__init__(drafter, model, batch_size, sequences, sampling)
        self.trees = TreeBatch.from_trees([DraftTree.chain(0)] * batch_size, device=sampling.seeds.device)

    def propose(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        return Draft(torch.full_like(lengths, -1), self.trees)


class FixedNgram(FixedDrafter):
    drafter: NgramDrafter

    def propose(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        d = self.drafter
        return ngram_propose(
            tokens, lengths, max_nodes=d.max_nodes, max_depth=d.max_depth, min_ngram=d.min_ngram,
            max_ngram=d.max_ngram, max_branches=d.max_branches, active=active,
        )  # fmt: skip


class FixedMedusa(FixedDrafter):
    drafter: MedusaDrafter

    def __init__(
        self,
        drafter: MedusaDrafter,
        model: PackedModel,
        batch_size: int,
        sequences: Sequence[GeneratedSequence],
        sampling: Sampling,
    ) -> None:
        super().__init__(drafter, model, batch_size, sequences, sampling)
        self.hidden = model.new_hidden(batch_size)
        self._rows = list(self.hidden)

    def load(self, sequences: list[GeneratedSequence]) -> None:
        known = self.drafter._hidden
        # A sequence that no pass has read yet drafts from an arbitrary state.
        states = [known.get(sequence.index, row) for sequence, row in zip(sequences, self._rows, strict=False)]
        if any(state is not row for state, row in zip(states, self._rows, strict=False)):
            self.hidden[: len(states)] = torch.stack(states)
        # From here on the buffer's rows are what the drafter knows.
        known.update({sequence.index: row for sequence, row in zip(sequences, self._rows, strict=False)})

    def propose(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        return medusa_propose(self.drafter.heads(self.hidden), self.drafter.tree, active=active)

    def observe(self, result: StepResult, active: Tensor) -> None:
        assert result.hidden is not None
        last_rows = result.commit.accept_rows.gather(1, result.commit.num_accepted[:, None].long())[:, 0]
        last = result.hidden.index_select(0, last_rows.clamp(min=0))
        self.hidden.copy_(torch.where(active[:, None], last, self.hidden))


class FixedModel(FixedDrafter):
    """The draft model reads the last two tokens of a row, the root and the one before it, which may be in its cache or
    not, then its levels. Its pool holds all sequences from the beginning: it cannot grow under a graph.
    """

    drafter: ModelDrafter

    def __init__(
        self,
        drafter: ModelDrafter,
        model: PackedModel,
        batch_size: int,
        sequences: Sequence[GeneratedSequence],
        sampling: Sampling,
    ) -> None:
        super().__init__(drafter, model, batch_size, sequences, sampling)
        drafter._attend()
        cache, nodes = drafter.cache, drafter.max_kv_nodes
        pages = [cache.pages_for(sequence.max_length + nodes) for sequence in sequences]
        if cache.num_pages < sum(pages):
            cache.grow(sum(pages) - cache.num_pages)
        self.table = Mirror((batch_size, max(pages)), torch.int32, cache.device)

    def load(self, sequences: list[GeneratedSequence]) -> None:
        d = self.drafter
        behind = [s for s in sequences if s.index not in d._known or d._cached[s.index] < len(s.tokens) - 2]
        if behind:
            d._read(behind)
        for sequence in sequences:
            d._reserve(sequence, sequence.root + d.max_kv_nodes)
        self.table.set([d.cache.pages(sequence.index) for sequence in sequences])

    def propose(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        d, table, start = self.drafter, self.table.tensor, lengths - 1
        positions = start.long()[:, None] + torch.arange(-1, 1, device=start.device)
        ids = tokens.gather(1, positions.clamp(min=0))
        offsets = torch.arange(self.batch_size + 1, dtype=torch.int32, device=start.device) * 2
        slots = slot_mapping(table, lengths, offsets, d.cache.page_size, total_q=2 * self.batch_size)
        step = PagedStep(d.cache, table, lengths, offsets, slots, None, None, max_seqlen_q=2)
        known = ids.flatten().clamp(max=d.vocab_size - 1)
        logits, _ = d.packed.run(known, positions.clamp(min=0).flatten(), step)
        return d.grow(logits[1::2], ids[:, 1], table, start, self.sampling.at(rows), active)

    def observe(self, result: StepResult, active: Tensor) -> None:
        committed = result.commit
        assert committed.draft_accept_index is not None and committed.draft_num_accepted is not None
        compact_kv(
            self.drafter.cache.tensors(), self.table.tensor, result.start, committed.draft_accept_index,
            committed.draft_num_accepted,
        )  # fmt: skip

    def advance(self, sequences: list[GeneratedSequence]) -> None:
        self.drafter.keep_accepted(sequences)


KINDS: dict[type[Drafter], type[FixedDrafter]] = {
    NoDrafter: FixedRoots,
    NgramDrafter: FixedNgram,
    MedusaDrafter: FixedMedusa,
    ModelDrafter: FixedModel,
}


def check_fixed(drafter: Drafter) -> None:
    """Raises ValueError for a drafter whose work cannot be captured in a graph."""
    if not vars(type(drafter)).get("is_capturable"):
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(f"cuda_graph: expected a drafter of {kinds}, got {type(drafter).__name__}")
    if isinstance(drafter, NgramDrafter) and drafter.remember:
        raise ValueError(
            f"cuda_graph: expected NgramDrafter(remember=0), whose text has a fixed size, got {drafter.remember}"
        )


def fixed_drafter(
    drafter: Drafter, model: PackedModel, batch_size: int, sequences: Sequence[GeneratedSequence], sampling: Sampling
) -> FixedDrafter:
    """The part of `drafter` in a step of `batch_size` rows of `sequences`, which `model` is to continue."""
    kind = next(part for base, part in KINDS.items() if isinstance(drafter, base))
    return kind(drafter, model, batch_size, sequences, sampling)
