"""Additions of DFlash 2 to block drafters."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pagedtree.generation.drafters.block_config import BlockDraftConfig

__all__ = ["CandidateSelector", "LocalConvolution"]


class LocalConvolution(nn.Module):
    """Convolutions over the tokens of a block, before and after a part of a layer.

    Each channel of a token becomes a weighted sum of the same channel at this and earlier tokens of its block. A weight
    is a trained one plus one computed from the token, which `conv_group_size` channels share.
    """

    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        kernel, group = config.conv_kernel_size, config.conv_group_size
        assert kernel is not None and group is not None
        self.block_size, self.kernel_size, self.num_groups = config.block_size, kernel, config.hidden_size // group
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel, config.hidden_size, dtype=torch.get_default_dtype()))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * kernel * self.num_groups, bias=False)

    def before(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Maps states [..., T, H] of whole blocks to the part's input; also returns the weights for `behind`."""
        shape = (2, self.kernel_size, self.num_groups)
        weights = cast(Tensor, self.kernel_projection(states)).unflatten(-1, shape)
        return self._convolved(states, weights[..., 0, :, :], self.base_kernel[0]), weights[..., 1, :, :]

    def behind(self, states: Tensor, weights: Tensor) -> Tensor:
        return self._convolved(states, weights, self.base_kernel[1])

    def _convolved(self, states: Tensor, weights: Tensor, base: Tensor) -> Tensor:
        blocks = states.unflatten(-2, (-1, self.block_size)).unflatten(-1, (self.num_groups, -1))
        own = weights.unflatten(-3, (-1, self.block_size))[..., None]  # [..., blocks, size, kernel, groups, 1]
        out = torch.zeros_like(blocks)
        for back in range(self.kernel_size):
            kernel = base[back].view(self.num_groups, -1) + own[..., back, :, :]
            out[..., back:, :, :] += kernel[..., back:, :, :] * blocks[..., : self.block_size - back, :, :]
        return out.view_as(states)


class CandidateSelector(nn.Module):
    """Scores of the likeliest tokens of a place given the token before it: a sum over `selector_rank` products."""

    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        rank, top_k, vocab_size = config.selector_rank, config.selector_top_k, config.vocab_size
        assert rank is not None and top_k is not None and vocab_size is not None
        self.top_k = top_k
        rows = torch.zeros(vocab_size, rank, dtype=torch.get_default_dtype())
        self.predecessor_codebook, self.successor_codebook = nn.Parameter(rows), nn.Parameter(rows.clone())
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, states: Tensor, before: Tensor, candidates: Tensor, logits: Tensor) -> Tensor:
        """Returns scores [B, F, K] of a place's candidates, int64 [B, K] with logits [B, K], after each of the tokens
        `before`, int64 [B, F]. states: [B, H], the place's."""
        context = self.predecessor_codebook[before] * self.hidden_projection(states)[:, None]
        return logits[:, None] + context @ self.successor_codebook[candidates].transpose(1, 2)
