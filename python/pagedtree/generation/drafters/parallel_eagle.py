"""The drafter of P-EAGLE heads (Hui et al., 2026)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import Draft
from pagedtree.generation.drafters.base import best_trees
from pagedtree.generation.drafters.eagle import EagleDrafter
from pagedtree.generation.drafters.eagle_head import EagleHead

__all__ = ["ParallelEagleDrafter"]


class ParallelEagleDrafter(EagleDrafter):
    """A P-EAGLE head that predicts all levels in one pass and proposes the likeliest tree over them.

    The text is followed by `depth - 1` unknown tokens, the head's mask token with `mask_hidden` as features. Each sees
    the text and the ones before it, and gives one level's distribution. Trees are as in `BlockDrafter`, the rest as in
    `EagleDrafter`.

    head: one with `mask_hidden` (`EagleHead.from_pretrained` of a folder of speculators); ValueError without.
    num_nodes, depth, width: as in `ModelDrafter`.
    """

    grows_by_level = False
    is_capturable = False

    def __init__(self, head: EagleHead, *, num_nodes: int = 16, depth: int = 8, width: int = 8) -> None:
        with torch.no_grad():
            head.unknown_state()  # refuses other heads
        super().__init__(head, num_nodes=num_nodes, depth=depth, width=width)
        self.width = width
        self._log_probs: Tensor | None = None  # joint ones, of the last proposal's nodes

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        self._log_probs = None  # of trees of the root alone
        return super().propose(tokens, lengths)

    def confidence(self) -> Tensor | None:
        return self._log_probs

    def _guess(self, table: Tensor, lengths: Tensor) -> Draft:
        states = self._read_until(self._unread_ends(), table, num_unknown=self._depth - 1)
        logits = self.head.logits(states.view(len(self._selected), self._depth, -1))
        draft, self._log_probs = best_trees(logits, self.max_nodes, self.width)
        return draft
