"""Masks of `tree_attention` for attention that follows no tree."""

from __future__ import annotations

import torch
from torch import Tensor


def all_visible(num_queries: int, seq_lens: Tensor) -> dict[str, Tensor]:
    """Returns tree_mask and tree_lens that show each query all keys of its sequence: the mask covers no keys."""
    mask = torch.zeros(1, 1, dtype=torch.int32, device=seq_lens.device).expand(num_queries, 1)
    return {"tree_mask": mask, "tree_lens": torch.zeros_like(seq_lens)}
