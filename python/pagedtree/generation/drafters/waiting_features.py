"""Target features that wait: in queues, and in tensors between captured steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import Tensor

from pagedtree.generation.drafters.base import Drafter, FeatureRows, StepResult
from pagedtree.generation.scheduler import GeneratedSequence

# Limit of queued features of all sequences, in bytes; beyond it they are read.
MAX_WAITING_BYTES = 1 << 28

# A sequence, the position of its first token, and the features, [n, F], of n tokens from there on.
Features = tuple[GeneratedSequence, int, Tensor]


@dataclass
class _Queue:
    sequence: GeneratedSequence
    begin: int
    count: int = 0
    parts: list[Tensor] = field(default_factory=list)


class WaitingFeatures:
    """Queues of the features that `Drafter.read` and `observe` receive.

    Consecutive passes without drafts over the same sequences stay unsorted until `sort`.

    enter: called for features of a sequence without a queue, with the position of the first. read_many: takes some
    features; called when more than MAX_WAITING_BYTES wait.
    """

    def __init__(self, enter: Callable[[GeneratedSequence, int], None], read_many: Callable[[], None]) -> None:
        self._enter, self._read_many = enter, read_many
        self._queues: dict[int, _Queue] = {}
        self._plain: list[Tensor] = []  # unsorted passes, their number of rows and their sequences
        self._num_plain = 0
        self._plain_sequences: list[GeneratedSequence] = []
        self._plain_start: list[int] = []
        self._rows: FeatureRows | None = None  # of the pass of the next `observe`
        self._num_bytes = 0  # upper bound of all queued features

    def read(self, rows: FeatureRows) -> None:
        """Queues the features of prefill tokens; others wait for `observe`."""
        self._rows = rows
        self._num_bytes += rows.features.nbytes
        if rows.counts:
            self.sort()
            self.put(rows.known())
            self._read_if_many()

    def observe(self, result: StepResult) -> None:
        """Queues the features of the accepted paths, from the pass of the last `read`."""
        assert self._rows is not None
        if not self._keep_plain(self._rows, result):
            self.sort()
            self.put(self._rows.accepted(result))
        self._rows = None
        self._read_if_many()

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        """Returns the sequences' number of queued tokens, excluding each one's newest."""
        held = [sequence.index for sequence in sequences if self._plain or sequence.index in self._queues]
        return self._num_plain + sum(map(self.count, held)) - len(held)

    def sort(self) -> None:
        """Moves the features of unsorted passes to their sequences' queues."""
        if self._plain:
            parts = torch.stack(self._plain, dim=1).unbind()
            self._plain, self._num_plain = [], 0
            self.put(list(zip(self._plain_sequences, self._plain_start, parts, strict=True)))

    def count(self, index: int) -> int:
        return self._queues[index].count if index in self._queues else 0

    def take(self, index: int, count: int) -> Tensor:
        """Removes and returns the features of a sequence's first `count` queued tokens, [count, F]."""
        queue = self._queues.pop(index)
        features = torch.cat(queue.parts)
        if rest := queue.count - count:
            self._queues[index] = _Queue(queue.sequence, queue.begin + count, rest, [features[count:].clone()])
        features = features[:count]
        self._num_bytes -= features.nbytes
        return features

    def take_all(self) -> list[Features]:
        queues, self._queues, self._num_bytes = self._queues, {}, 0
        return [(queue.sequence, queue.begin, torch.cat(queue.parts)) for queue in queues.values()]

    def forget(self, index: int) -> None:
        self.sort()
        self._queues.pop(index, None)

    def _keep_plain(self, rows: FeatureRows, result: StepResult) -> bool:
        """Keeps a pass unsorted if it only decodes the same sequences, without drafts."""
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
        # The bound includes rejected nodes and finished sequences: count again.
        self._num_bytes = sum(part.nbytes for queue in self._queues.values() for part in queue.parts)
        if self._num_bytes > MAX_WAITING_BYTES:
            self._read_many()


class FeatureReader(Drafter):
    """Base of drafters that keep the target's features in queues."""

    _waiting: WaitingFeatures

    def read(self, rows: FeatureRows) -> None:
        self._waiting.read(rows)

    def observe(self, result: StepResult) -> None:
        self._waiting.observe(result)

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        return self._waiting.unread(sequences)


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
        self.counts[sequence.index] = 0

    def take(self, sequences: Sequence[GeneratedSequence]) -> list[Features]:
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
