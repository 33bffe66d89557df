"""The proposal that every drafter hands to the target model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pagedtree.tree import TreeBatch

__all__ = ["Draft"]


class Draft(NamedTuple):
    """A drafter's proposal for one step of the target model.

    Attributes:
        draft_tokens: int64 [N], row cu_nodes[b] + i = token of node i of tree b. N is fixed, B times the most nodes a
            tree may have; the trees are packed and padding (-1) comes last.
        trees: their shapes.
        draft_probs: fp32 [M, V] or None; the distributions from which the children were drawn (laws "iid" and "swor").
        draft_rows: int64 [N] or None; row of draft_probs for node n's children (0 <= row < M for every node).
        node_map: int32 [N] or None; the node's index among the draft model's KV nodes, -1 if it was never fed.
    """

    draft_tokens: Tensor
    trees: TreeBatch
    draft_probs: Tensor | None = None
    draft_rows: Tensor | None = None
    node_map: Tensor | None = None
