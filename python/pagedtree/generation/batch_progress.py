"""What tokens of the sequences of a batch are worth: the batch is done when its last sequence is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["BatchProgress"]

# A sequence is far ahead of the last one if it has less than this share of that one's tokens to come. With a larger
# share, those are neglected that a few lucky steps have brought forward, and that are the last ones soon after.
AHEAD = 0.5


class BatchProgress:
    """What counts while a batch decodes: where all of its sequences have their places, those that are far ahead of the
    last one save only the time of their own rows. Where others wait for a place, every token counts.

    left: [B], the tokens that each sequence still has to come. others_wait: whether sequences wait for a place.
    row_share: of a plain step's time that a row adds.

    Attributes:
        weights: [B], what a token of each sequence is worth, in plain steps; a plain step gives 1 in all.
        counts: [B], whether each sequence is one whose tokens count in full.
    """

    def __init__(self, left: Iterable[int], others_wait: bool, row_share: float) -> None:
        self._left, self._others_wait = list(left), others_wait
        size, least = len(self._left), 0.0 if others_wait else AHEAD * max(self._left)
        self.counts = [left >= least for left in self._left]
        of_row = min(row_share, 1.0 / size)
        more = (1.0 - of_row * size) / sum(self.counts)
        self.weights = [of_row + more * counts for counts in self.counts]

    def made(self, found: Sequence[int]) -> float:
        """How many plain steps a step stood for in which the sequences got `found` [B] tokens.

        What brings others forward, and not the last one, counts by the chance that these will be the last ones later.
        """
        of_all = sum(weight * count for weight, count in zip(self.weights, found, strict=True))
        if self._others_wait:
            return of_all
        last = max(left - count for left, count in zip(self._left, found, strict=True))
        of_last = max(self._left) - max(last, 0)
        return of_last + (of_all - of_last) / len(self._left)

    def expected(self, gain: float) -> float:
        """How many plain steps to expect of a step whose accepted drafts are worth `gain` plain ones.

        The more sequences there are, the less of it is the last one's.
        """
        return 1.0 + (gain if self._others_wait else gain * 2.0 / (len(self._left) + 1))
