"""N-gram drafts with a memory across requests (SuffixDecoding, Oliaro et al., 2024)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedtree.generation.drafters.ngram import NgramDrafter
from pagedtree.generation.drafters.text_memory import TextMemory
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

# Places of former texts used per branch of a tree.
RUNS_OF_A_BRANCH = 2


class SuffixDrafter(NgramDrafter):
    """Prompt lookup in the text itself and in former answers, for repetitive requests.

    Generated tokens are remembered across calls of `generate`. If at least the last four tokens of a text occur there,
    their continuation is a candidate too. Longer n-grams come first; at equal length the text itself, then the most
    frequent continuation.

        tree = ngram_propose(text, extra=memory.continuations(text[-max_ngram:]))

    max_tokens: of the memory, oldest dropped first. memory: an existing one, which sets max_ngram; drafters may share
    it, also across threads. The others: as in `NgramDrafter`.
    """

    is_capturable = False

    def __init__(
        self,
        max_tokens: int = 1_000_000,
        *,
        memory: TextMemory | None = None,
        num_nodes: int = 32,
        max_depth: int | None = None,
        max_branches: int = 4,
        min_ngram: int = 1,
        max_ngram: int = 16,
    ) -> None:
        self.memory = (
            TextMemory(max_tokens, context=min(4, max_ngram), max_ngram=max_ngram) if memory is None else memory
        )
        super().__init__(
            num_nodes,
            max_depth=max_depth,
            max_branches=max_branches,
            min_ngram=min_ngram,
            max_ngram=self.memory.max_ngram,
        )
        self._remembered: dict[int, int] = {}  # tokens of each sequence

    def begin(self, page_size: int, sampling: Sampling) -> None:
        super().begin(page_size, sampling)
        self._remembered.clear()

    def _copied(self) -> tuple[np.ndarray, np.ndarray]:
        assert self._proposed is not None
        tokens, lengths, draft, extra = self._proposed
        if extra is not None:
            tokens, lengths = torch.cat([extra, tokens], dim=1), lengths + extra.shape[1]
            self._proposed = tokens, lengths, draft, None
        return super()._copied()

    def _extra(self, tokens: Tensor) -> Tensor | None:
        most = RUNS_OF_A_BRANCH * self.max_branches
        runs = [
            self.memory.continuations(sequence.tokens[-self.max_ngram :], self._depth, most)
            for sequence in self._selected
        ]
        count = max(map(len, runs))
        if count == 0:
            return None
        if len(runs) > 1:  # pad missing rows
            runs = [np.pad(rows, ((count - len(rows), 0), (0, 0)), constant_values=-1) for rows in runs]
        return torch.from_numpy(np.concatenate(runs).reshape(len(runs), -1)).to(tokens.device)

    def forget(self, sequence: GeneratedSequence) -> None:
        """Remembers the generated tokens, after the ones that they are looked up by."""
        super().forget(sequence)
        begin = max(self._remembered.get(sequence.index, sequence.prompt_len), sequence.prompt_len)
        if len(sequence.tokens) > begin:
            self.memory.add(sequence.tokens[max(begin - self.max_ngram, 0) :])
            self._remembered[sequence.index] = len(sequence.tokens)
