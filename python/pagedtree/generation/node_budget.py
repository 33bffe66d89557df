"""Which nodes of a batch's trees the target verifies: those whose chance to be accepted is worth their time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pagedtree import _C, Draft, TreeBatch

__all__ = ["NodeBudget", "best_count"]


class NodeBudget:
    """Estimates which drafted nodes survive, from what was accepted before.

    How likely a node is where its parent was accepted comes from the drafter's own log-probability of that step
    (`Drafter.confidence`), corrected by how often nodes of about the same one were right, or from how often nodes of
    its depth and rank were. Both are counted at all children of accepted nodes, verified or not: each was right if its
    token is the one that came. What a sequence accepts beside what was expected of it makes it easy or hard to guess.

        for node in tree:
            rate[node] = right / tried of nodes of its confidence, or of its depth and rank
            survival[node] = survival[parent] * rate[node] * (what the sequence accepted / what it was expected to)

    It is compiled (csrc/bindings/node_budget.cpp), because it is asked in every step: in NumPy it took 15 % of a small
    model's.
    """

    def __init__(self) -> None:
        self._native = _C.NodeBudget()

    def begin(self) -> None:
        """Forgets what is known of single sequences."""
        self._native.of_sequences = {}

    @property
    def acceptance(self) -> np.ndarray:
        """[depth, rank]: how often a node is accepted where its parent was."""
        return self._native.acceptance()

    def survival(self, trees: TreeBatch, confidence: Tensor | None, sequences: Sequence[int]) -> np.ndarray:
        """[N]: how likely each node is on the accepted path; 1 at roots.

        confidence: [N], the nodes' joint log-probabilities by the drafter. sequences: the index of each tree's.
        """
        known = None if confidence is None else confidence.cpu().numpy()
        offsets, parents = trees.cu_nodes.cpu().numpy(), trees.parents.cpu().numpy()
        return self._native.survival(offsets, parents, known, np.array(sequences, dtype=np.int64))

    def fade(self) -> None:
        """A step has told nothing: older evidence counts a little less."""
        self._native.fade()

    def observe(
        self, draft: Draft, kept: Tensor | None, accept_index: Tensor, tokens: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Counts what became of the nodes that `survival` was asked about last. Returns for each tree how many of them
        were compared with the token that came, and how many were right.

        draft: what was asked about. kept: int32, the rows that were verified, None for all; -1 is padding.
        accept_index, tokens: [B, S], the accepted nodes of each kept tree, and the token that came behind each.
        """
        drafted, accepted, came = (each.cpu().numpy() for each in (draft.draft_tokens, accept_index, tokens))
        return self._native.observe(drafted, None if kept is None else kept.cpu().numpy(), accepted, came)


def best_count(worth: np.ndarray, is_draft: np.ndarray, fixed: float, row: float) -> int:
    """How many rows, all roots among them, get the most done in a second.

    worth: [N] what a node is worth if it is accepted, times how likely that is. is_draft: bool [N], False at roots.
    fixed, row: seconds of a step without drafts, and of each node besides the roots.
    """
    return _C.best_count(worth, is_draft, fixed, row)
