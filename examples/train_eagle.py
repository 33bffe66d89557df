"""Trains an EAGLE-3 head for a causal language model of transformers, from the model's own answers to prompts.

    python examples/train_eagle.py --target FOLDER --out DIR --bf16      # into DIR/eagle
    python examples/train_eagle.py --target FOLDER --out DIR --prompts FILE --held-out FILE
    python examples/train_eagle.py                     # for the toy, from the text of train_tiny.py
    python examples/train_eagle.py --steps 3 --out DIR # a smoke test, with DIR/target

A run that was stopped goes on from its last checkpoint, and nothing is answered or read twice; a finished one is only
evaluated again. docs/your_model.md goes through it step by step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from head_training import DrafterTraining, Recipe, attention_sizes, cross_entropy, train_drafter
from own_texts import Text
from torch import Tensor
from torch.nn import functional as F
from training_text import SEED, Answers, Batch, Windows, layer_outputs

from pagedtree.integrations.transformers import EagleDrafter, EagleHead

# Training-time test: the head reads its own states so many times, each weighed less than the one before.
UNROLLED, DECAY = 4, 0.8
# At so many random places of each text of a batch; the first time, at all places.
BRANCHES = 64


def default_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late one: those that SGLang and vLLM take by themselves, if there are as many."""
    if num_layers < 6:
        return tuple(range(max(num_layers - 1, 1)))
    return 1, num_layers // 2 - 1, num_layers - 4


def new_head(
    target: Any, layers: tuple[int, ...], target_ids: Tensor, intermediate_size: int, heads: tuple[int, int, int]
) -> EagleHead:
    """heads: query heads, KV heads, and their size."""
    config = target.config.get_text_config()
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": 10000.0,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
    }
    head = EagleHead(sizes, target.get_input_embeddings(), target.get_output_embeddings(), layers, target_ids)
    # Begin with states that the output layer reads well: the highest of the layers, under the target's own norm.
    norm = getattr(getattr(target.get_decoder(), "norm", None), "weight", None)
    with torch.no_grad():
        head.fc.weight.zero_()[:, -config.hidden_size :].fill_diagonal_(1.0)
        if norm is not None:
            head.norm.weight.copy_(norm)
    return head


class Unrolled:
    """Attention of a head that drafts from several positions at once, from each in a branch of its own.

    The first pass is causal, over the target's features at all positions. In pass m, the row of root t is m tokens
    further; it sees what the first pass saw at t, and of the later passes the rows of its own branch.

    roots: int64 [B, R].
    """

    def __init__(self, roots: Tensor) -> None:
        self.roots = roots
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[-2] // k.shape[-2]
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, -2), v.repeat_interleave(group, -2)))
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        length = self.keys[0].shape[-2]
        q = q * q.shape[-1] ** -0.5
        is_later = torch.arange(length) > self.roots[:, None, :, None]
        scores = (q @ self.keys[0].transpose(-1, -2)).masked_fill(is_later, -torch.inf)
        own = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = weights[..., :length] @ self.values[0]
        for i, value in enumerate(self.values[1:]):
            out = out + weights[..., length + i, None] * value
        return out.transpose(1, 2)


def unrolled_states(head: EagleHead, tokens: Tensor, features: Tensor, roots: Tensor) -> list[Tensor]:
    """The head's states in each of UNROLLED passes: in the first one at all positions, [B, T, H], where what
    `head.logits` makes of row t is about token t + 2; in pass m at the roots, [B, R, H], about tokens roots + 2 + m.

    tokens: [B, T + 1]. features: [B, T, F], of the first T. roots: int64 [B, R], less than T - UNROLLED.
    """
    attend = Unrolled(roots)
    states = head(tokens[:, 1:], head.fuse(features), torch.arange(features.shape[1]), attend)
    found = [states]
    states = states.gather(1, roots[..., None].expand(-1, -1, states.shape[-1]))
    for m in range(1, UNROLLED):
        states = head(tokens.gather(1, roots + 1 + m), states, roots + m, attend)
        found.append(states)
    return found


class EagleTraining(DrafterTraining):
    name = "eagle"
    recipe = Recipe(steps=2400, learning_rate=2e-3, batch=2)
    own_recipe = Recipe(steps=3000, learning_rate=2e-3, batch=1, context=768)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--draft-vocab", type=int, help="the most frequent tokens (default 8192; of the toy 1536)")
        parser.add_argument("--intermediate-size", type=int, help="default: half of the target's hidden size")
        parser.add_argument("--heads", type=int, nargs=3, metavar=("QUERY", "KV", "SIZE"), help="default: the target's")
        parser.add_argument("--feature-layers", type=int, nargs="+", help="whose outputs it reads, counted from 0")
        parser.add_argument(
            "--needs-target",
            action="store_true",
            help="leave out the output layer, which is rows of the target's; only pagedtree can load such a head",
        )
        shape = ("NODES", "DEPTH", "WIDTH")
        parser.add_argument("--tree", type=int, nargs=3, default=(8, 4, 2), metavar=shape, help="as it is tried")

    def layers(self, target: Any) -> tuple[int, ...]:
        return tuple(self.args.feature_layers or default_layers(target.config.get_text_config().num_hidden_layers))

    def new(self, target: Any, tokenizer: Any, source: Windows | Answers) -> EagleHead:
        args = self.args
        size, heads, count = target.config.get_text_config().hidden_size // 2, attention_sizes(target), 8192
        if args.target is None:  # the toy's are small, to be stored in the repository
            size, heads, count = 160, (2, 1, 64), 1536
        size, heads, count = args.intermediate_size or size, tuple(args.heads or heads), args.draft_vocab or count
        ids = source.frequencies.argsort(descending=True, stable=True)[:count].sort().values
        share = source.frequencies[ids].sum() / source.frequencies.sum()
        print(f"eagle: {len(ids)} draft tokens, {share:.2%} of the text")
        return new_head(target, self.layers(target), ids, size, heads)

    def loss_of(self, head: EagleHead, source: Windows | Answers) -> Callable[[int], Tensor]:
        index = torch.full((head.config.vocab_size,), -1)
        index[head.target_ids] = torch.arange(head.vocab_size)
        return lambda step: unrolled_loss(head, source.batch(step), index, SEED + step)

    def save(self, head: EagleHead, folder: Path) -> None:
        head.save_pretrained(folder, needs_target=self.args.needs_target or self.args.target is None)

    def drafter(self, folder: Path, target: Any) -> EagleDrafter:
        nodes, depth, width = self.args.tree
        return EagleDrafter(EagleHead.from_pretrained(folder, target), num_nodes=nodes, depth=depth, width=width)

    @torch.no_grad()
    def report(self, drafter: EagleDrafter, target: Any, texts: Sequence[Text]) -> None:
        """Tells how often each pass names the token that the target chose, if those before it were right."""
        head = drafter.head
        hits: list[list[Tensor]] = [[] for _ in range(UNROLLED)]
        for text in texts:
            tokens = torch.tensor([text.tokens])
            features, _ = layer_outputs(target, head.feature_layers, tokens[:, :-1])
            # From the prompt's last token on, every token that is guessed is one that the target chose.
            roots = torch.arange(text.start - 2, tokens.shape[1] - 1 - UNROLLED)[None]
            for m, states in enumerate(unrolled_states(head, tokens, features, roots)):
                states = states[:, roots[0]] if m == 0 else states
                guesses = head.target_ids[head.logits(states)[0].topk(3).indices]
                hits[m].append(guesses == tokens[0, roots[0] + 2 + m, None])
        for m, each in enumerate(hits):
            top = torch.cat(each).float().mean(0).cumsum(0)
            print(f"eagle: level {m + 1} on the target's greedy continuations: top-1 {top[0]:.1%}, top-3 {top[2]:.1%}")


def unrolled_loss(head: EagleHead, batch: Batch, index: Tensor, seed: int) -> Tensor:
    """index: int64 [V], each token's number in the draft vocabulary, -1 for others."""
    tokens, probs = batch.teacher(index)
    # Where the target's own choice is no draft token, nothing is to be learnt.
    is_learnt = batch.is_learnt & (probs.sum(-1) > 0)
    roots = batch.places(BRANCHES, UNROLLED + 1, seed)
    texts, loss = torch.arange(len(roots))[:, None], torch.zeros(())
    for m, states in enumerate(unrolled_states(head, batch.tokens, batch.features, roots)):
        rows = torch.arange(1, states.shape[1])[None] if m == 0 else roots + 1 + m
        states = states[:, : rows.shape[1]]
        chosen = is_learnt[texts, rows]
        losses = cross_entropy(head.logits(states[chosen]), tokens[texts, rows][chosen], probs[texts, rows][chosen])
        loss = loss + DECAY**m * losses.sum() / chosen.sum().clamp(min=1)
    return loss / sum(DECAY**m for m in range(UNROLLED))


if __name__ == "__main__":
    train_drafter(EagleTraining(), __doc__)
