"""Tree masks as booleans and as the words that `tree_attention` takes; the adapters translate between the two."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["all_visible", "pack_intervals", "pack_mask", "unpack_mask"]


def pack_mask(mask: Tensor) -> Tensor:
    """Packs bool [..., n] into int32 [..., ceil(n / 32)]: bit j % 32 of word j // 32 is mask[..., j]."""
    n = mask.shape[-1]
    words = -(-n // 32)
    bits = torch.nn.functional.pad(mask.bool(), (0, 32 * words - n)).view(*mask.shape[:-1], words, 4, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits * weights).sum(-1, dtype=torch.uint8).view(torch.int32).squeeze(-1)


def pack_intervals(begin: Tensor, end: Tensor, n: int) -> Tensor:
    """Packs int [...], int [...] into int32 [..., ceil(n / 32)]: the words of a mask that is True from begin to end -
    1."""
    first = torch.arange(0, n, 32, device=begin.device, dtype=torch.int64)
    below_begin, below_end = ((1 << (x[..., None] - first).clamp(0, 32)) - 1 for x in (begin, end))
    return (below_end & ~below_begin).int()


def unpack_mask(words: Tensor, n: int) -> Tensor:
    """Unpacks int32 [..., W] into bool [..., n], n <= 32 * W."""
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten(-2)[..., :n].bool()


def all_visible(num_queries: int, seq_lens: Tensor) -> dict[str, Tensor]:
    """Returns tree_mask and tree_lens with which every query sees every key of its sequence: the mask covers none of
    the keys.

    The rows of the mask are one and the same word in memory.
    """
    mask = torch.zeros(1, 1, dtype=torch.int32, device=seq_lens.device).expand(num_queries, 1)
    return {"tree_mask": mask, "tree_lens": torch.zeros_like(seq_lens)}
