"""Validation of a drafter's proposal."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import refusal
from pagedtree.drafting import Draft
from pagedtree.tree import TreeBatch

__all__ = ["as_draft", "check_values", "rows_of"]


def as_draft(proposal: Any, batch_size: int, device: torch.device) -> Draft:
    """Returns the `Draft` in a drafter's proposal for `batch_size` sequences on `device`; no tensor is read.

    Raises TypeError or ValueError, naming the drafter, for another object, number of trees, shape, dtype or device.
    """
    if not isinstance(proposal, tuple | list) or not 2 <= len(proposal) <= len(Draft._fields):
        wanted = "propose to return draft_tokens, a TreeBatch and draft_probs or None"
        raise refusal("drafter", wanted, _kinds(proposal), TypeError)
    draft = Draft(*proposal)
    tokens, trees, probs, rows = draft.draft_tokens, draft.trees, draft.draft_probs, draft.draft_rows
    if not isinstance(tokens, Tensor) or not isinstance(trees, TreeBatch):
        raise refusal("drafter", "draft_tokens as a Tensor and a TreeBatch", _kinds(proposal), TypeError)
    num_rows = trees.parents.shape[0]
    if trees.batch_size != batch_size or num_rows < batch_size or tokens.shape != (num_rows,):
        found = f"{trees.batch_size} trees of {num_rows} nodes and draft_tokens {list(tokens.shape)}"
        raise refusal("drafter", f"{batch_size} trees and one token per node", found)
    if not _is_integral(tokens):
        raise refusal("drafter", "integers as draft_tokens", tokens.dtype)
    if probs is not None and not isinstance(probs, Tensor):
        raise refusal("drafter", "draft_probs as a Tensor or None", type(probs).__name__, TypeError)
    if probs is not None and (probs.ndim != 2 or not probs.is_floating_point()):
        raise refusal("drafter", "draft_probs [M, V]", f"{probs.dtype} {list(probs.shape)}")
    if probs is not None and rows is None and probs.shape[0] < num_rows:
        raise refusal("drafter", f"draft_probs of {num_rows} nodes, or draft_rows", list(probs.shape))
    for name, tensor in (("draft_tokens", tokens), ("trees", trees), ("draft_probs", probs)):
        if tensor is not None and tensor.device.type != device.type:
            raise refusal("drafter", f"{name} on {device}", tensor.device)
    if rows is None:
        return draft
    if not isinstance(rows, Tensor) or rows.shape != (num_rows,) or not _is_integral(rows):
        description = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise refusal("drafter", f"draft_rows as integers [{num_rows}]", description)
    return draft


def check_values(draft: Draft) -> None:
    """Raises ValueError unless the trees' offsets ascend from 0 to at most the number of rows. Reads them."""
    offsets, num_rows = draft.trees.cu_nodes.tolist(), draft.draft_tokens.shape[0]
    if offsets[0] != 0 or offsets[-1] > num_rows or any(end < begin for begin, end in pairwise(offsets)):
        raise refusal("drafter", f"cu_nodes that ascend from 0 to at most {num_rows}", offsets)


def rows_of(draft: Draft, trees: TreeBatch, rows: Tensor) -> Draft:
    """Returns the part of a draft that `select_nodes` kept: its trees, and their rows in `draft`, -1 for padding."""
    at = rows.clamp(min=0).long()
    draft_rows, node_map = (None if tensor is None else tensor[at] for tensor in (draft.draft_rows, draft.node_map))
    tokens = torch.where(rows < 0, -1, draft.draft_tokens[at])
    return Draft(tokens, trees, draft.draft_probs, draft_rows, node_map)


def _is_integral(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _kinds(proposal: Any) -> str:
    if not isinstance(proposal, tuple | list):
        return type(proposal).__name__
    return f"({', '.join(type(value).__name__ for value in proposal)})"
