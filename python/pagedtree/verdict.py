"""What verification returns, whichever the rule."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Verdict"]


class Verdict(NamedTuple):
    """The accepted path of each of B trees; S = trees.max_depth + 1.

    Attributes:
        accept_index: int32 [B, S], node ids of the path: the root's 0 first, then the accepted drafts, then -1.
        num_accepted: int32 [B], draft tokens accepted; root and bonus are not counted.
        tokens: int64 [B, S], tokens[b, j] follows node accept_index[b, j]: the accepted drafts, then at
            num_accepted[b] the bonus (the token that the target model adds), then -1.
        status: int32 [B], 0 or a sum of 1 (malformed tree) and 2 (a row that the walk read had NaN or no finite logit).

    A tree of no nodes (an idle sequence) has only -1 in accept_index and tokens, num_accepted 0 and status 1;
    `TreeBatch.active` tells it from a malformed one.
    """

    accept_index: Tensor
    num_accepted: Tensor
    tokens: Tensor
    status: Tensor
