"""Masks as bits: bit j % 32 of int32 word j // 32 is entry j."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["packed", "unpacked"]


def packed(mask: Tensor) -> Tensor:
    """Packs bool [..., n] into int32 [..., ceil(n / 32)]; the bits behind the last entry are 0."""
    n = mask.shape[-1]
    words = -(-n // 32)
    bits = torch.nn.functional.pad(mask.bool(), (0, 32 * words - n)).view(*mask.shape[:-1], words, 4, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits * weights).sum(-1, dtype=torch.uint8).view(torch.int32).squeeze(-1)


def unpacked(words: Tensor, n: int) -> Tensor:
    """Unpacks int32 [..., W] into bool [..., n], n <= 32 * W."""
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten(-2)[..., :n].bool()
