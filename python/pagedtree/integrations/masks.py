"""Tree masks as booleans and as the words that `tree_attention` takes; what the adapters translate between."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_mask", "unpack_mask"]


def pack_mask(mask: Tensor) -> Tensor:
    """bool [..., n] -> int32 [..., ceil(n / 32)]: bit j % 32 of word j // 32 is mask[..., j]."""
    n = mask.shape[-1]
    words = -(-n // 32)
    bits = torch.nn.functional.pad(mask.bool(), (0, 32 * words - n)).view(*mask.shape[:-1], words, 32)
    return (bits.int() << torch.arange(32, dtype=torch.int32, device=mask.device)).sum(-1, dtype=torch.int32)


def unpack_mask(words: Tensor, n: int) -> Tensor:
    """int32 [..., W] -> bool [..., n], n <= 32 * W."""
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten(-2)[..., :n].bool()
