"""Target features kept between captured steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedtree.generation.drafters.base import StepResult
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["FixedFeatures"]


class FixedFeatures:
    """Features of the tokens that each sequence read and accepted in the last step, but its newest.

    features: [num_sequences + 1, length, width]; the first `counts`, int64 [num_sequences + 1], of each row are valid;
    the last row is for idle rows. held: on the host, position of the first feature, by index of the sequences.
    """

    def __init__(self, num_sequences: int, length: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.features = torch.zeros(num_sequences + 1, length, width, dtype=dtype, device=device)
        self.counts = torch.zeros(num_sequences + 1, dtype=torch.int64, device=device)
        self.held: dict[int, int] = {}

    def put(self, sequence: GeneratedSequence, features: Tensor) -> None:
        """Stores the features [1, F] of the token before the sequence's newest one."""
        self.features[sequence.index, :1], self.counts[sequence.index] = features, 1
        self.held[sequence.index] = sequence.root - 1

    def clear(self, sequence: GeneratedSequence) -> None:
        """Drops a sequence's features."""
        self.counts[sequence.index] = 0

    def take(self, sequences: Sequence[GeneratedSequence]) -> list[tuple[GeneratedSequence, int, Tensor]]:
        """Removes and returns these sequences' features: (sequence, position of the first token, [count, F])."""
        begins = [(s, self.held.pop(s.index)) for s in sequences if s.index in self.held]
        return [(s, begin, self.features[s.index, : s.root - begin].clone()) for s, begin in begins]

    def store(self, result: StepResult, rows: Tensor) -> None:
        """Stores the features of the roots and the accepted nodes. Device only."""
        assert result.features is not None
        path = result.commit.accept_rows.clamp(min=0)
        features = result.features.index_select(0, path.flatten().long()).view(*path.shape, -1)
        self.features[:, : path.shape[1]].index_copy_(0, rows, features)
        self.counts.index_copy_(0, rows, result.verdict.num_accepted.long() + 1)
