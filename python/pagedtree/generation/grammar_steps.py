"""Grammars in the steps of `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from pagedtree import Draft
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.grammars import GrammarFill, GrammarMasks, GrammarMatcher


class GrammarSteps:
    """The grammars of all sequences of a call. matchers: one per sequence, None: no grammar. vocab: columns of the
    target's logits, of all ranks together. eos_ids: tokens that end every text."""

    def __init__(self, matchers: Sequence[GrammarMatcher | None], vocab: int, eos_ids: Sequence[int]) -> None:
        self._matchers, self._eos_ids = list(matchers), set(eos_ids)
        self._filled = self._waited = 0.0
        self._masks = GrammarMasks(self._matchers, vocab)
        self._fill: GrammarFill | None = None

    def fill(self, sequences: Sequence[GeneratedSequence], draft: Draft) -> None:
        matchers = [self._matchers[sequence.index] for sequence in sequences]
        self._fill = None
        if any(matcher is not None for matcher in matchers):
            self._masks.matchers = matchers
            self._fill = self._masks.fill(draft.draft_tokens, draft.trees)

    def mask(self) -> Tensor | None:
        """Returns the packed masks; None if no sequence of the step has a grammar."""
        if self._fill is None:
            return None
        mask = self._fill.result()
        self._filled += self._fill.filled or 0.0
        self._waited += self._fill.waited or 0.0
        return mask

    def end(self, sequence: GeneratedSequence, tokens: list[int]) -> int | None:
        """Advances the sequence's matcher; returns how many tokens remain if the text ends with or in them, else None.

        A text ends with the token that completes it, or, if grammar and other options allow none, before a forbidden
        token that is not EOS.
        """
        matcher = self._matchers[sequence.index]
        if matcher is None:
            return None
        begin = time.perf_counter()
        end = None
        for count, token in enumerate(tokens):
            if not matcher.accept(token):
                end = count + (token in self._eos_ids)
            elif matcher.is_terminated():
                end = count + 1
            if end is not None:
                break
        self._waited += time.perf_counter() - begin
        return end

    def close(self) -> tuple[float, float]:
        """Ends the threads. Returns the seconds of filling, and of waiting and advancing."""
        self._masks.close()
        return self._filled, self._waited
