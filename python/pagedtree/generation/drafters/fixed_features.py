"""Features of the target that wait on the device, from one captured step to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedtree.generation.drafters.base import StepResult
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["FixedFeatures"]


class FixedFeatures:
    """For each sequence the features of the tokens that the last step read and accepted, in front of its newest token.

    Attributes:
        features: [sequences + 1, S, F], the first ones count; the last row is that of idle rows.
        counts: int64 [sequences + 1].
        held: of which sequences, by index, with the position of the first one, which features stand here. The host's.

    Args:
        num_sequences: of a call of `generate`. length: the most tokens of a step. width: F.
    """

    def __init__(self, num_sequences: int, length: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.features = torch.zeros(num_sequences + 1, length, width, dtype=dtype, device=device)
        self.counts = torch.zeros(num_sequences + 1, dtype=torch.int64, device=device)
        self.held: dict[int, int] = {}

    def put(self, sequence: GeneratedSequence, features: Tensor) -> None:
        """Takes over those of the token in front of the sequence's newest one, [1, F]."""
        self.features[sequence.index, :1], self.counts[sequence.index] = features, 1
        self.held[sequence.index] = sequence.root - 1

    def clear(self, sequence: GeneratedSequence) -> None:
        """Notes that there are none of this sequence, whose guesses are then of no worth."""
        self.counts[sequence.index] = 0

    def take(self, sequences: Sequence[GeneratedSequence]) -> list[tuple[GeneratedSequence, int, Tensor]]:
        """Gives those of these sequences back: each one, the position of its first token, and [count, F]."""
        begins = [(s, self.held.pop(s.index)) for s in sequences if s.index in self.held]
        return [(s, begin, self.features[s.index, : s.root - begin].clone()) for s, begin in begins]

    def store(self, result: StepResult, rows: Tensor) -> None:
        """Keeps those of the roots and the accepted nodes; runs on the device alone."""
        assert result.features is not None
        path = result.commit.accept_rows.clamp(min=0)
        found = result.features.index_select(0, path.flatten().long()).view(*path.shape, -1)
        self.features[:, : path.shape[1]].index_copy_(0, rows, found)
        self.counts.index_copy_(0, rows, result.verdict.num_accepted.long() + 1)
