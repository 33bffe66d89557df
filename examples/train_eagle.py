"""Trains an EAGLE-3 head for the demo's target, on the text and with the tools of train_tiny.py.

    python examples/train_eagle.py                     # into examples/checkpoints/eagle; learns from .../target
    python examples/train_eagle.py --steps 3 --out DIR # a smoke test, with DIR/target

A run that was stopped goes on from its last checkpoint; a finished one is only evaluated again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from train_tiny import Recipe, fit, train_drafter
from transformers import LlamaForCausalLM

from pagedtree.integrations.transformers import EagleHead

RECIPE = Recipe(steps=2400, learning_rate=2e-3, batch=2)
FEATURE_LAYERS = (0, 1, 2)
# The most frequent tokens: 97.5 % of the text.
DRAFT_VOCAB_SIZE = 1536
# Training-time test: the head reads its own states so many times, each weighed less than the one before.
UNROLLED, DECAY = 4, 0.8


def new_head(target: LlamaForCausalLM, target_ids: Tensor) -> EagleHead:
    config = target.config
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 160,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
    }
    head = EagleHead(sizes, target.model.embed_tokens, target.lm_head, FEATURE_LAYERS, target_ids)
    # Begin with states that the output layer reads well: the highest of the layers, under the target's own norm.
    with torch.no_grad():
        head.fc.weight.zero_()[:, -config.hidden_size :].fill_diagonal_(1.0)
        head.norm.weight.copy_(target.model.norm.weight)
    return head


class Unrolled:
    """Attention of a head that drafts from every position at once, as a branch of its own.

    The first pass is causal, over the target's features. In pass m the row of position t is m tokens further; it sees
    what the first pass saw there, and of the later passes the rows of its own branch.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, length = q.shape[-2] // k.shape[-2], q.shape[-3]
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, -2), v.repeat_interleave(group, -2)))
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        scores = q @ self.keys[0].transpose(-1, -2)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        own = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).mul(q.shape[-1] ** -0.5).float().softmax(-1).to(q.dtype)
        out = weights[..., :length] @ self.values[0]
        for i, value in enumerate(self.values[1:]):
            out = out + weights[..., length + i, None] * value
        return out.transpose(1, 2)


def unrolled_logits(head: EagleHead, tokens: Tensor, features: Tensor, count: int = UNROLLED) -> list[Tensor]:
    """The head's logits `[batch, T - count, draft vocabulary]` in each pass; in pass m, row t is about token t + 2 + m.

    tokens `[batch, T + 1]`, features `[batch, T, F]` of the first T.
    """
    attend, found = Unrolled(), []
    length = features.shape[1] - count
    states = head.fuse(features[:, :length])
    for m in range(count):
        positions = torch.arange(m, m + length)
        states = head(tokens[:, 1 + m : 1 + m + length], states, positions, attend)
        found.append(head.logits(states))
    return found


def features_and_logits(target: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out = target(tokens, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer + 1] for layer in FEATURE_LAYERS], dim=-1), out.logits.float()


def frequent_tokens(tokens: Tensor, vocab_size: int) -> Tensor:
    counts = torch.bincount(tokens, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB_SIZE].sort().values


def train(target: LlamaForCausalLM, tokens: Tensor, recipe: Recipe, args: argparse.Namespace) -> None:
    head = new_head(target, frequent_tokens(tokens, target.config.vocab_size))
    is_drafted = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    is_drafted[head.target_ids] = True

    def loss_of(batch: Tensor, step: int) -> Tensor:
        features, teacher_logits = features_and_logits(target, batch[:, :-1])
        passes = unrolled_logits(head, batch, features)
        length = passes[0].shape[1]
        loss = torch.zeros(())
        for m, logits in enumerate(passes):
            teacher = teacher_logits[:, 1 + m : 1 + m + length]
            # Where the target's own choice is no draft token, nothing is to be learnt.
            mask = is_drafted[teacher.argmax(-1)]
            wanted = teacher[..., head.target_ids].softmax(-1)
            cross_entropy = -(wanted * logits.float().log_softmax(-1)).sum(-1)
            loss = loss + DECAY**m * (cross_entropy * mask).sum() / mask.sum()
        return loss / sum(DECAY**m for m in range(UNROLLED))

    def save() -> None:
        # Its output layer is rows of the target's, which need not be stored twice.
        head.save_pretrained(args.out / "eagle", needs_target=True)

    fit("eagle", head, loss_of, save, tokens, recipe, args)


@torch.no_grad()
def evaluate(target: LlamaForCausalLM, out: Path, greedy: list[tuple[int, Tensor]]) -> None:
    """How often each pass names the token that the target chose, if those before it were right."""
    head = EagleHead.from_pretrained(out / "eagle", target)
    hits: list[list[Tensor]] = [[] for _ in range(UNROLLED)]
    for start, tokens in greedy:
        features, _ = features_and_logits(target, tokens[:, :-1])
        for m, logits in enumerate(unrolled_logits(head, tokens, features)):
            guesses = head.target_ids[logits[0].topk(3).indices]
            expected = tokens[0, 2 + m : 2 + m + len(guesses)]
            # From the prompt's last token on, every token that is guessed is one that the target chose.
            first = max(start - 2 - m, 0)
            hits[m].append(guesses[first:] == expected[first:, None])
    for m, each in enumerate(hits):
        top = torch.cat(each).float().mean(0).cumsum(0)
        print(f"eagle: level {m + 1} on the target's greedy continuations: top-1 {top[0]:.1%}, top-3 {top[2]:.1%}")


if __name__ == "__main__":
    train_drafter(__doc__, RECIPE, train, evaluate)
