"""What steps of `generate` cost: plain ones, and what drafts add to them."""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["StepCosts"]

# What each step with drafts keeps of the older ones' costs; how many rows the guess is taken to be seen at.
KEPT, GUESSED_ROWS = 0.95, 8.0
# A step that takes so many times as long as others of its kind: the machine was busy with something else.
HICCUP = 2.0


class StepCosts:
    """What steps of about one batch size take, in seconds.

    row_guess: what a row is taken to add for as long as none was measured.

    Attributes:
        num_plain, num_drafted: steps without and with drafts so far. most_rows: of one of them, besides the roots.
        plain: a step without drafts, the median of the last ones.
        level, once, row: what drafts add to it: each level of the drafter's; the target's pass, whatever the tree; each
            row besides the roots.
    """

    def __init__(self, row_guess: float) -> None:
        self.row_guess = row_guess
        self.num_plain = self.num_drafted = self.most_rows = 0
        self.plain = self.level = self.once = self.row = 0.0
        self._plain: deque[float] = deque(maxlen=15)
        # Of steps with drafts, older ones counting less: seconds and levels of drafting; how many there are, sums of
        # rows, their squares, seconds that they added, and products of both.
        self._drafting = 0.0, 0.0
        self._sums: tuple[float, ...] = (0.0,) * 5

    def expected(self, levels: float, rows: float) -> float:
        """Seconds of a step with drafts."""
        return self.plain + self.once + self.level * levels + self.row * rows

    def add_plain(self, seconds: float) -> None:
        """Takes in a step without drafts."""
        self._plain.append(seconds)
        self.plain = statistics.median_low(self._plain)  # the first one may be slow
        self.num_plain += 1
        if self.num_drafted == 0:
            self._fit()

    def add_drafted(self, levels: float, rows: int, drafting: float, seconds: float, is_typical: bool = True) -> float:
        """Takes in a step with drafts; returns its seconds, fewer if something else kept the machine busy.

        rows: besides the roots. drafting: what of `seconds` the drafter took. is_typical: whether its levels took that
        time, and not the reading of what it had missed.
        """
        if self.num_drafted > 2 and is_typical:
            seconds = min(seconds, HICCUP * self.expected(levels, rows))
        drafting = min(drafting, seconds)
        if is_typical and levels > 0:
            self._drafting = KEPT * self._drafting[0] + drafting, KEPT * self._drafting[1] + levels
        if rows == 0:  # the target made a plain pass
            self.add_plain(seconds - drafting)
            return seconds
        added = seconds - drafting - self.plain
        news = (1.0, rows, rows * rows, added, rows * added)
        self._sums = tuple(KEPT * old + new for old, new in zip(self._sums, news, strict=True))
        self.num_drafted, self.most_rows = self.num_drafted + 1, max(self.most_rows, rows)
        self._fit()
        return seconds

    def _fit(self) -> None:
        """A line through what rows added, as if steps without any and with GUESSED_ROWS had confirmed the guesses."""
        guess = max(self.row_guess, 1e-3 * self.plain)
        steps, rows, squares, added, products = self._sums
        most = 0.02 * self.plain + GUESSED_ROWS * guess
        steps, rows, squares = steps + 2.0, rows + GUESSED_ROWS, squares + GUESSED_ROWS**2
        added, products = added + 0.02 * self.plain + most, products + GUESSED_ROWS * most
        self.row = max((steps * products - rows * added) / (steps * squares - rows * rows), 0.0)
        self.once = max((added - self.row * rows) / steps, 0.0)
        self.level = (self._drafting[0] + 0.005 * self.plain) / (self._drafting[1] + 0.05)
