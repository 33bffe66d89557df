"""What a block drafter learns: many blocks of one text in a single pass, each with its own part of the text as context.

Source: DFlash (Chen et al., 2026), which learns from the tokens of the text where this takes the target's distribution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedtree.generation.drafters import BlockDraftModel

__all__ = ["block_logits", "block_loss", "sample_roots"]


def sample_roots(num_sequences: int, length: int, block_size: int, count: int, generator: torch.Generator) -> Tensor:
    """int64 [num_sequences, count]: random places of known tokens in front of blocks that end inside the text."""
    return torch.randint(1, length - block_size + 2, (num_sequences, count), generator=generator)


def block_logits(model: BlockDraftModel, tokens: Tensor, features: Tensor, roots: Tensor) -> Tensor:
    """Logits [B, R, block_size - 1, V] of the tokens after `roots` [B, R], in one pass over texts [B, S] with features
    [B, S, F].
    """
    block_size, length = model.config.block_size, tokens.shape[1]
    batch, count = roots.shape
    positions = roots[..., None] + torch.arange(block_size)
    block = torch.full_like(positions, model.config.mask_token_id)
    block[..., 0] = tokens.gather(1, roots)
    context = model.context(features, torch.arange(length).expand(batch, length))
    # A block sees the text in front of its first token, and itself.
    sees_text = torch.arange(length) < roots[..., None].expand(-1, -1, block_size).reshape(batch, -1, 1)
    own = torch.arange(count).repeat_interleave(block_size)
    sees_block = (own[:, None] == own).expand(batch, -1, -1)
    mask = torch.cat([sees_text, sees_block], dim=-1)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(context[layer], (k, v), strict=True))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True)
        return out.transpose(1, 2)

    states = model(block.flatten(1), positions.flatten(1), attend).unflatten(1, (count, block_size))
    return model.logits(states[:, :, 1:])


def block_loss(
    model: BlockDraftModel, tokens: Tensor, features: Tensor, teacher_logits: Tensor, roots: Tensor
) -> Tensor:
    """Cross entropy to the target's distributions, weighted less with depth: a token counts only after all before it.

    teacher_logits: [B, S, V], the target's at every token of the texts.
    """
    logits = block_logits(model, tokens, features, roots).float()
    depths = torch.arange(logits.shape[2])
    rows = roots[..., None] + depths
    teacher = teacher_logits[torch.arange(len(rows))[:, None, None], rows].softmax(-1)
    loss = -(teacher * logits.log_softmax(-1)).sum(-1)
    weights = torch.exp(-depths / (model.config.block_size / 2))
    return (loss * weights).mean() / weights.mean()
