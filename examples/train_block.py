"""Trains a block drafter (DFlash) for a causal language model of transformers, from the model's own answers to prompts.

    python examples/train_block.py --target FOLDER --out DIR --bf16      # into DIR/block
    python examples/train_block.py --target FOLDER --out DIR --prompts FILE --held-out FILE
    python examples/train_block.py                     # for the toy, from the text of train_tiny.py
    python examples/train_block.py --steps 3 --out DIR # a smoke test, with DIR/target

A run that was stopped goes on from its last checkpoint, and nothing is answered or read twice; a finished one is only
evaluated again.

Source: DFlash (Chen et al., 2026), which learns from the tokens of the text where this takes the target's distribution.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from head_training import DrafterTraining, Recipe, attention_sizes, cross_entropy, train_drafter
from own_texts import Text
from torch import Tensor, nn
from torch.nn import functional as F
from training_text import SEED, Answers, Batch, Windows, layer_outputs

from pagedtree.integrations.transformers import BlockDraftConfig, BlockDrafter, BlockDraftModel

BLOCKS_PER_TEXT = 64


def new_model(target: Any, layers: tuple[int, ...], mask_token_id: int, sizes: dict[str, int]) -> BlockDraftModel:
    """In fp32, but for the target's own embeddings and output layer."""
    config = BlockDraftConfig(
        hidden_size=target.config.get_text_config().hidden_size,
        mask_token_id=mask_token_id,
        target_layer_ids=layers,
        **sizes,
    )
    model = BlockDraftModel(config, target.get_input_embeddings(), target.get_output_embeddings())
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


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


class BlockTraining(DrafterTraining):
    name = "block"
    recipe = Recipe(steps=6000, learning_rate=3e-3, batch=2)
    own_recipe = Recipe(steps=6000, learning_rate=1e-3, batch=2, context=1024)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--block-size", type=int, default=8, help="tokens of a block, the known one included")
        parser.add_argument("--intermediate-size", type=int, help="default: the target's hidden size; of the toy 104")
        parser.add_argument("--num-layers", type=int, default=2)
        parser.add_argument("--blocks", type=int, default=BLOCKS_PER_TEXT, help="that are learnt of a text in a step")
        parser.add_argument("--feature-layers", type=int, nargs="+", help="whose outputs it reads, counted from 0")
        parser.add_argument("--mask-token", type=int, help="default: BOS, or else EOS")
        parser.add_argument("--nodes", type=int, default=16, help="of the tree with which it is tried")

    def layers(self, target: Any) -> tuple[int, ...]:
        count = target.config.get_text_config().num_hidden_layers
        return tuple(self.args.feature_layers or sorted({max(count // 2 - 1, 0), count - 1}))

    def new(self, target: Any, tokenizer: Any, source: Windows | Answers) -> BlockDraftModel:
        args, size, heads = self.args, target.config.get_text_config().hidden_size, attention_sizes(target)
        if args.target is None:  # the toy's are small, to be stored in the repository
            size, heads = 104, (2, 1, 64)
        mask = next(
            token for token in (args.mask_token, tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None
        )
        sizes = {
            "intermediate_size": args.intermediate_size or size,
            "num_hidden_layers": args.num_layers,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "head_dim": heads[2],
            "block_size": args.block_size,
        }
        return new_model(target, self.layers(target), mask, sizes)

    def loss_of(self, model: BlockDraftModel, source: Windows | Answers) -> Callable[[int], Tensor]:
        return lambda step: block_loss(model, source.batch(step), self.args.blocks, SEED + step)

    def save(self, model: BlockDraftModel, folder: Path) -> None:
        model.save_pretrained(folder)

    def drafter(self, folder: Path, target: Any) -> BlockDrafter:
        return BlockDrafter(BlockDraftModel.from_pretrained(folder, target), num_nodes=self.args.nodes)

    @torch.no_grad()
    def report(self, drafter: BlockDrafter, target: Any, texts: Sequence[Text]) -> None:
        model, hits = drafter.model, []
        depth = model.config.block_size - 1
        for text in texts:
            tokens = torch.tensor([text.tokens])
            features, _ = layer_outputs(target, model.config.target_layer_ids, tokens)
            # From the first token that the target chose on, it chose all that a block has to guess.
            roots = torch.arange(text.start, tokens.shape[1] - depth)
            guesses = block_logits(model, tokens, features, roots[None])[0].topk(3).indices
            hits.append(guesses == tokens[0, roots[:, None] + torch.arange(1, depth + 1), None])
        top = torch.cat(hits).float().mean(0).cumsum(-1)
        for level, (first, _, third) in enumerate(top.tolist(), 1):
            print(f"block: level {level} on the target's greedy continuations: top-1 {first:.1%}, top-3 {third:.1%}")


def block_loss(model: BlockDraftModel, batch: Batch, count: int, seed: int) -> Tensor:
    """Returns the loss of `count` blocks per text, at random places of what is to be learnt."""
    size, texts = model.config.block_size, batch.tokens[:, :-1]
    roots = batch.places(count, size, seed)
    rows = roots[..., None] + torch.arange(size - 1)
    which = torch.arange(len(texts))[:, None, None]
    tokens, probs = (each[which, rows] for each in batch.teacher())
    losses = cross_entropy(block_logits(model, texts, batch.features, roots), tokens, probs)
    # A guess counts only where all before it are right.
    weights = torch.exp(-torch.arange(size - 1) / (size / 2)) * batch.is_learnt[which, rows]
    return (losses * weights).sum() / weights.sum()


if __name__ == "__main__":
    train_drafter(BlockTraining(), __doc__)
