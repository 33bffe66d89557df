"""Features of the target that wait until the model of a drafter reads them, in order for each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import Tensor

from pagedtree.generation.drafters.base import FeatureRows, StepResult
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["MAX_WAITING_BYTES", "WaitingFeatures"]

# Features that wait, of all sequences, take so many bytes at most: more are read at once.
MAX_WAITING_BYTES = 1 << 28

# A sequence, the position of its first token, and the features, [n, F], of n tokens from there on.
Features = tuple[GeneratedSequence, int, Tensor]


@dataclass
class _Queue:
    """Features of `count` tokens of a sequence from position `begin` on."""

    sequence: GeneratedSequence
    begin: int
    count: int = 0
    parts: list[Tensor] = field(default_factory=list)


class WaitingFeatures:
    """Takes in what `Drafter.read` and `observe` are told of every pass, until the drafter asks for it.

    Passes in which the same sequences decode without drafts are kept as they came: sorting them by sequence in each
    pass took 1.5 % of a small model's step. `sort` does it, which has to come before anything is asked.

    Args:
        enter: called for features of a sequence of which none wait, with the sequence and the position of the first.
        read_many: has to take some out; called when more than MAX_WAITING_BYTES wait.
    """

    def __init__(self, enter: Callable[[GeneratedSequence, int], None], read_many: Callable[[], None]) -> None:
        self._enter, self._read_many = enter, read_many
        self._queues: dict[int, _Queue] = {}
        self._plain: list[Tensor] = []  # of passes that are not sorted yet, with this many rows, of these sequences
        self._num_plain = 0
        self._plain_sequences: list[GeneratedSequence] = []
        self._plain_start: list[int] = []
        self._rows: FeatureRows | None = None  # of the pass that `observe` is about to tell of
        self._num_bytes = 0  # of all of them, at most

    def read(self, rows: FeatureRows) -> None:
        """Queues the features of known tokens; those of trees wait for `observe`."""
        self._rows = rows
        self._num_bytes += rows.features.nbytes
        if rows.counts:
            self.sort()
            self.put(rows.known())
            self._read_if_many()

    def observe(self, result: StepResult) -> None:
        """Queues the features of the accepted paths of the pass that `read` was told of."""
        assert self._rows is not None
        if not self._keep_plain(self._rows, result):
            self.sort()
            self.put(self._rows.accepted(result))
        self._rows = None
        self._read_if_many()

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        """Returns how many tokens of these sequences wait, besides the newest of each."""
        held = [sequence.index for sequence in sequences if self._plain or sequence.index in self._queues]
        return self._num_plain + sum(map(self.count, held)) - len(held)

    def sort(self) -> None:
        """Gives each sequence the features of its plain passes."""
        if self._plain:
            parts = torch.stack(self._plain, dim=1).unbind()
            self._plain, self._num_plain = [], 0
            self.put(list(zip(self._plain_sequences, self._plain_start, parts, strict=True)))

    def count(self, index: int) -> int:
        """Returns how many tokens of the sequence of this index wait, without those that are not sorted."""
        return self._queues[index].count if index in self._queues else 0

    def take(self, index: int, count: int) -> Tensor:
        """Takes out the features of the first `count` tokens that wait of a sequence, [count, F]."""
        queue = self._queues.pop(index)
        features = torch.cat(queue.parts)
        if rest := queue.count - count:
            self._queues[index] = _Queue(queue.sequence, queue.begin + count, rest, [features[count:].clone()])
        features = features[:count]
        self._num_bytes -= features.nbytes
        return features

    def take_all(self) -> list[Features]:
        """Takes out the features of all sequences."""
        queues, self._queues, self._num_bytes = self._queues, {}, 0
        return [(queue.sequence, queue.begin, torch.cat(queue.parts)) for queue in queues.values()]

    def forget(self, index: int) -> None:
        """Drops the features of a sequence."""
        self.sort()
        self._queues.pop(index, None)

    def _keep_plain(self, rows: FeatureRows, result: StepResult) -> bool:
        """Keeps a pass as it is, unless it is another kind of pass, or one of other sequences."""
        if rows.counts or result.trees.max_nodes > 1:
            return False
        if not self._plain:
            self._plain_sequences, self._plain_start = rows.sequences, rows.start
        elif len(rows.sequences) != len(self._plain_sequences) or not all(
            map(is_, rows.sequences, self._plain_sequences)
        ):
            return False
        self._plain.append(rows.features)
        self._num_plain += rows.features.shape[0]
        return True

    def put(self, parts: list[Features]) -> None:
        """Queues features behind those that wait of each sequence."""
        for sequence, begin, features in parts:
            if sequence.index not in self._queues:
                self._enter(sequence, begin)
                self._queues[sequence.index] = _Queue(sequence, begin)
            queue = self._queues[sequence.index]
            assert begin == queue.begin + queue.count, "features come in order"
            queue.parts.append(features)
            queue.count += features.shape[0]

    def _read_if_many(self) -> None:
        if self._num_bytes <= MAX_WAITING_BYTES:
            return
        self.sort()
        # Rejected nodes and finished sequences were counted, too.
        self._num_bytes = sum(part.nbytes for queue in self._queues.values() for part in queue.parts)
        if self._num_bytes > MAX_WAITING_BYTES:
            self._read_many()
