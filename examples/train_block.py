"""Trains a block drafter (DFlash) for the demo's target, on the text and with the tools of train_tiny.py.

    python examples/train_block.py                     # into examples/checkpoints/block; learns from .../target
    python examples/train_block.py --steps 3 --out DIR # a smoke test, with DIR/target

A run that was stopped goes on from its last checkpoint; a finished one is only evaluated again.

Source: DFlash (Chen et al., 2026), which learns from the tokens of the text where this takes the target's distribution.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_tiny import SEED, Recipe, fit, train_drafter
from transformers import LlamaForCausalLM

from pagedtree.integrations.transformers import BlockDraftConfig, BlockDraftModel

RECIPE = Recipe(steps=6000, learning_rate=3e-3, batch=2)
BLOCKS_PER_TEXT = 64


def new_model(target: LlamaForCausalLM) -> BlockDraftModel:
    config = BlockDraftConfig(
        hidden_size=target.config.hidden_size,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        block_size=8,
        mask_token_id=0,  # BOS, which nothing has to guess
        target_layer_ids=(1, 3),
    )
    model = BlockDraftModel(config, target.get_input_embeddings(), target.lm_head)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


@torch.no_grad()
def target_states(target: LlamaForCausalLM, layers: tuple[int, ...], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of these layers at all tokens, side by side, and the logits."""
    found: dict[int, Tensor] = {}
    handles = [
        target.model.layers[i].register_forward_hook(lambda _, args, output, i=i: found.update({i: output}))
        for i in layers
    ]
    logits = target(tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return torch.cat([found[i] for i in layers], dim=-1), logits


def block_logits(model: BlockDraftModel, tokens: Tensor, features: Tensor, roots: Tensor) -> Tensor:
    """Logits [B, R, block_size - 1, V] of the places behind `roots` [B, R], all blocks of a text in one pass.

    tokens: [B, S]. features: [B, S, F], the target's.
    """
    size, length = model.config.block_size, tokens.shape[1]
    batch, count = roots.shape
    positions = roots[..., None] + torch.arange(size)
    blocks = torch.full_like(positions, model.config.mask_token_id)
    blocks[..., 0] = tokens.gather(1, roots)
    context = model.context(features, torch.arange(length).expand(batch, length))
    # A block sees the text in front of its root, and itself.
    sees_text = torch.arange(length) < roots[..., None].expand(-1, -1, size).reshape(batch, -1, 1)
    block_of = torch.arange(count).repeat_interleave(size)
    sees_block = (block_of[:, None] == block_of).expand(batch, -1, -1)
    mask = torch.cat([sees_text, sees_block], dim=-1)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(context[layer], (k, v), strict=True))
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True).transpose(1, 2)

    states = model(blocks.flatten(1), positions.flatten(1), attend).unflatten(1, (count, size))
    return model.logits(states[:, :, 1:])


def train(target: LlamaForCausalLM, tokens: Tensor, recipe: Recipe, args: argparse.Namespace) -> None:
    """At random places of the text the model learns the distributions that the target has in those that follow."""
    model = new_model(target)
    size = model.config.block_size
    # A guess counts only where all before it are right.
    weights = torch.exp(-torch.arange(size - 1) / (size / 2))

    def loss_of(batch: Tensor, step: int) -> Tensor:
        texts = batch[:, :-1]
        features, teacher_logits = target_states(target, model.config.target_layer_ids, texts)
        generator = torch.Generator().manual_seed(SEED + step)
        # Blocks end inside the text.
        roots = torch.randint(1, texts.shape[1] - size + 2, (len(texts), BLOCKS_PER_TEXT), generator=generator)
        logits = block_logits(model, texts, features.float(), roots).float()
        rows = roots[..., None] + torch.arange(size - 1)
        teacher = teacher_logits[torch.arange(len(texts))[:, None, None], rows].float()
        return weighted_cross_entropy(logits, teacher, weights)

    fit("block", model, loss_of, lambda: model.save_pretrained(args.out / "block"), tokens, recipe, args)


def weighted_cross_entropy(logits: Tensor, teacher_logits: Tensor, weights: Tensor) -> Tensor:
    losses = -(teacher_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return (losses * weights).mean() / weights.mean()


@torch.no_grad()
def evaluate(target: LlamaForCausalLM, out: Path, greedy: list[tuple[int, Tensor]]) -> None:
    model = BlockDraftModel.from_pretrained(out / "block", target)
    depth = model.config.block_size - 1
    hits = []
    for start, tokens in greedy:
        features, _ = target_states(target, model.config.target_layer_ids, tokens)
        # From the first token that the target chose on, it chose all that a block has to guess.
        roots = torch.arange(start, tokens.shape[1] - depth)
        guesses = block_logits(model, tokens, features, roots[None])[0].topk(3).indices
        hits.append(guesses == tokens[0, roots[:, None] + torch.arange(1, depth + 1), None])
    top = torch.cat(hits).float().mean(0).cumsum(-1)
    for level, (first, _, third) in enumerate(top.tolist(), 1):
        print(f"block: level {level} on the target's greedy continuations: top-1 {first:.1%}, top-3 {third:.1%}")


if __name__ == "__main__":
    train_drafter(__doc__, RECIPE, train, evaluate)
