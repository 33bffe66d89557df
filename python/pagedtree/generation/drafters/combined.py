"""Two drafters: n-grams where a text repeats itself, a model elsewhere."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pagedtree import Draft
from pagedtree.generation.drafters.base import Drafter, FeatureRows, StepResult, as_drafter
from pagedtree.generation.drafters.bounded import bounded, trees_of
from pagedtree.generation.drafters.ngram import NgramDrafter
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["CombinedDrafter"]


class CombinedDrafter(Drafter):
    """Copies where a text repeats itself, and asks another drafter elsewhere, for each sequence and step anew.

    A sequence gets the n-gram drafter's tree where at least `min_match` of its last tokens stood before that guess
    earlier; such guesses are right nine times of ten, and cost next to nothing. The other drafter is asked for the
    other sequences alone.

        for b in range(B):
            copied = lookup.propose(tokens[b])
            trees[b] = copied if same_tokens_before(copied) >= min_match else drafter.propose(tokens[b])

    Which sequences those are is decided on the host, so that a step on a GPU synchronises once more.

    Source: the hybrid mode of SuffixDecoding (Oliaro et al., 2024).

    Args:
        drafter: whose nodes are chosen without chance (draft_law "onehot"), as those of heads and draft models are by
            default.
        lookup: default chains of 7 tokens, after at most 8 equal ones.
        min_match: from 1 to the lookup's max_ngram.
    """

    has_free_guesses = True

    def __init__(self, drafter: Any, lookup: NgramDrafter | None = None, *, min_match: int = 4) -> None:
        self.other = other = bounded(as_drafter(drafter))
        self.lookup = lookup = NgramDrafter(8, max_branches=1, max_ngram=8) if lookup is None else lookup
        if other.draft_law != "onehot":
            raise ValueError(f'drafter: expected draft_law "onehot" beside n-grams, got "{other.draft_law}"')
        if not 1 <= min_match <= lookup.max_ngram:
            raise ValueError(f"min_match: expected 1 to the lookup's max_ngram, {lookup.max_ngram}, got {min_match}")
        self.min_match = min_match
        if other.max_nodes:  # else nobody knows
            self.max_nodes = max(lookup.max_nodes, other.max_nodes)
        else:
            self.max_nodes = 0
        self.max_depth = max(lookup.max_depth, other.max_depth or other.max_nodes - 1)
        self.is_chain = lookup.is_chain and other.is_chain
        self.needs_hidden = bool(getattr(other, "needs_hidden", False))
        self.feature_layers = tuple(getattr(other, "feature_layers", ()))
        self.grows_by_level = bool(getattr(other, "grows_by_level", False))
        self.num_weights = getattr(other, "num_weights", 0)
        self.networks = tuple(getattr(other, "networks", ()))
        self.model = getattr(other, "model", None)  # calls of `generate` that share it take turns
        self._only_copies = False  # whatever `min_match` says
        self._selected: list[GeneratedSequence] = []
        self._asked: list[int] = []  # the trees of the last proposal that are the other drafter's
        self._rows: Tensor | None = None  # of both proposals, one behind the other, which the last one was made of
        self._num_copied = 0  # rows of the n-gram drafter's

    def check_target(self, model: PackedModel) -> None:
        if hasattr(self.other, "check_target"):  # any object with `observe` is a drafter
            self.other.check_target(model)

    def prepare(self, sequences: list[GeneratedSequence]) -> None:
        self.other.prepare(sequences)

    def begin(self, page_size: int, sampling: Sampling) -> None:
        self.lookup.begin(page_size, sampling)
        self.other.begin(page_size, sampling)
        self._asked, self._only_copies = [], False

    def end(self) -> None:
        self.lookup.end()
        self.other.end()

    def select(self, sequences: list[GeneratedSequence], batch_size: int | None = None) -> None:
        self._selected = sequences
        self.lookup.select(sequences)

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        """The other drafter is told once it is known for which sequences."""

    def propose(
        self, tokens: Tensor, lengths: Tensor, active: Tensor | None = None, rows: Tensor | None = None
    ) -> Draft:
        copied, batch = self.lookup.propose(tokens, lengths), tokens.shape[0]
        self._num_copied, self._rows = copied.draft_tokens.shape[0], None
        self._asked = []
        if not self._only_copies:
            self._asked = np.flatnonzero(self.lookup.same_before() < self.min_match).tolist()
        if not self._asked:
            return copied
        self.other.select([self._selected[b] for b in self._asked])
        if len(self._asked) < batch:
            which = torch.tensor(self._asked).to(tokens.device)
            tokens, lengths = tokens.index_select(0, which), lengths.index_select(0, which)
        self.other.start(tokens, lengths)
        guessed = cast(Draft, self.other.propose(tokens, lengths))
        if len(self._asked) == batch:
            return guessed
        places = {b: batch + i for i, b in enumerate(self._asked)}
        combined, self._rows = trees_of([copied, guessed], [places.get(b, b) for b in range(batch)])
        return combined

    def confidence(self) -> Tensor | None:
        """Guesses that are copied and those of the other drafter have log-probabilities on one scale."""
        parts = [self.lookup.confidence(), self.other.confidence() if self._asked else None]
        if not self._asked or self._rows is None:
            return parts[bool(self._asked)]
        if parts[0] is None or parts[1] is None:
            return None
        rows = self._rows.cpu()
        values = torch.zeros(int(rows.max()) + 1)
        values[: len(parts[0])] = parts[0]
        values[self._num_copied :] = parts[1].cpu()[: len(values) - self._num_copied]
        return values[rows]

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        if not self._asked:
            return
        if self._rows is None:
            self.other.narrow(draft, rows)
            return
        part, picked = trees_of([draft], self._asked)
        self.other.narrow(part, (self._rows[rows.long()][picked] - self._num_copied).int())

    def read(self, rows: FeatureRows) -> None:
        self.other.read(rows)

    def observe(self, result: StepResult, rows: Tensor | None = None) -> None:
        self.lookup.observe(result)
        self.other.observe(result)

    def limit_depth(self, levels: int | None) -> None:
        self._only_copies = levels == 0
        if not self._only_copies:
            self.other.limit_depth(levels)

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        return self.other.unread(sequences)

    def forget(self, sequence: GeneratedSequence) -> None:
        self.lookup.forget(sequence)
        self.other.forget(sequence)
