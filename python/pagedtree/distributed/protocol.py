"""Exchange rounds over rows of logits, and the words of each round.

The numbers match shards.h and shard_distributions.h in csrc/core/verify, which document the words. A rank passes zeros
for the words that a round writes, and for a row's own words before the first round. Other words, or words from a round
with other arguments, give unspecified results but no access outside the tensors.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from pagedtree._ops import ops

__all__ = ["END_WORDS", "LEFT_WORDS", "ROW_WORDS", "Round", "Weigh", "num_digits"]

# int64 words that a rank keeps: per row, per node for rejection residuals, per walk end.
ROW_WORDS, LEFT_WORDS, END_WORDS = (int(words) for words in ops._shard_words().split(","))

# A threshold is found digit by digit; a round has a word for each value of a digit.
DIGIT_BITS = 4
BINS = 1 << DIGIT_BITS
# Only this many bits of a logit's key differ: sign, exponent and mantissa.
KEY_BITS = {torch.float32: 32, torch.float16: 1 + 8 + 10, torch.bfloat16: 1 + 8 + 7}


def num_digits(dtype: torch.dtype) -> int:
    """Returns the number of digits of a threshold among logits of this dtype."""
    return -(-KEY_BITS[dtype] // DIGIT_BITS)


class Round(IntEnum):
    """Exchange rounds for each row of logits; see ShardRound in csrc/core."""

    LEARN = 0  # sends nothing: applies the words of the last round
    PEAK = 1
    COUNT = 2
    MASS = 3
    TIES = 4
    RACE = 5
    LEFT = 6

    @property
    def words(self) -> int:
        """Words for each row."""
        return {Round.PEAK: 2, Round.COUNT: BINS, Round.MASS: BINS}.get(self, 1)


class Weigh(IntEnum):
    """Exchange rounds that weigh the drafts; see ResidualRound in csrc/core/verify/shard_distributions.h."""

    MASSES = 0
    RESIDUAL = 1
    SUMS = 2
    DRAW = 3

    @property
    def words(self) -> int:
        """Words for each row; for SUMS and DRAW, words for each tree."""
        return 1 if self == Weigh.DRAW else 2
