"""Trains an EAGLE-3 head for a causal language model of transformers on the model's own answers to prompts.

    python examples/train_head.py --target FOLDER --out heads --bf16
    python examples/train_head.py --target FOLDER --out heads --prompts FILE --held-out FILE

docs/your_model.md explains each step. An interrupted run starts again.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from real_prompts import chat_ids, held_out
from stdlib_text import STDLIB, read
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from pagedtree import SamplingParams
from pagedtree.generation.drafters import EagleDrafter, EagleHead, NgramDrafter
from pagedtree.integrations.transformers import generate

SEED = 0
PROMPTS = Path(__file__).parent / "prompts" / "training.json"
# Each prompt is answered at each temperature, in calls of CHUNK answers (which fix the seeds), BATCH at once.
TEMPERATURES, TOP_P, CHUNK, BATCH = (0.0, 0.8), 0.95, 192, 64
# The teacher's distribution covers the likeliest tokens; the rest is noise.
TEACHER_TOKENS = 32
CONTEXT = 768  # tokens of a step, and of the longest text
# Training-time test: UNROLLED passes, each with DECAY times the weight of the one before. The first covers all
# positions of a text; the others read the head's own states at BRANCHES random positions.
UNROLLED, DECAY, BRANCHES = 4, 0.8, 64
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Text:
    """A prompt and its answer, and the target's outputs for all T tokens but the last."""

    start: int  # of the answer
    tokens: Tensor  # int64 [T + 1]
    features: Tensor  # bfloat16 [T, F], outputs of the head's layers, concatenated
    likely: Tensor  # int64 [T, K], the likeliest next tokens in descending order
    logits: Tensor  # bfloat16 [T, K], of these


def excerpt(file: str, name: str = "") -> str:
    """Returns a docstring, or the source of a function or class, from Python's standard library."""
    source = read(STDLIB / file)
    node: Any = ast.parse(source)
    if not name:
        return ast.get_docstring(node) or ""
    for part in name.split("."):
        node = next(x for x in ast.walk(node) if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == part)
    return "\n".join(line[node.col_offset :] for line in source.splitlines()[node.lineno - 1 : node.end_lineno])


def read_prompts(file: Path) -> list[str]:
    """Reads a JSON list of texts. A text may be a list of parts, where a list [file, name] is an `excerpt`."""
    prompts = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(prompts, list) or not all(isinstance(prompt, str | list) for prompt in prompts):
        raise ValueError(f"{file}: expected a JSON list of texts, got {prompts!r:.80}")
    found = []
    for prompt in prompts:
        with suppress(FileNotFoundError, StopIteration):  # this version of Python may lack the module or function
            found.append("".join([part if isinstance(part, str) else excerpt(*part) for part in prompt]))
    return found


def answers(target: Any, layers: Sequence[int], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Text]:
    """Returns the target's answers to each prompt at each temperature, sorted by length."""
    asked = list(dict.fromkeys((tuple(prompt), temperature) for prompt in prompts for temperature in TEMPERATURES))
    texts = []
    for first in range(0, len(asked), CHUNK):
        chosen, temperatures = zip(*asked[first : first + CHUNK], strict=True)
        params = SamplingParams(temperature=torch.tensor(temperatures), top_p=TOP_P)
        how = {"max_new_tokens": max_new_tokens, "max_sequences": BATCH, "params": params}
        # Without drafts: measured costs determine trees, and in bfloat16 another tree rounds differently.
        sequences, stats = generate(target, [*map(list, chosen)], **how)
        texts += [read_by(target, layers, *text) for text in zip(map(len, chosen), sequences, strict=True)]
        print(f"answers: {len(texts)} of {len(asked)}, {stats.tokens_per_second:.0f} tokens/s", flush=True)
    texts = [text for text in texts if text.start < len(text.features)]
    if not texts:
        raise ValueError(f"--prompts: expected texts of fewer than {CONTEXT} tokens, got none")
    return sorted(texts, key=lambda text: len(text.tokens))


@torch.no_grad()
def read_by(target: Any, layers: Sequence[int], start: int, tokens: Tensor) -> Text:
    """Runs the target over a prompt and its answer, cut off after CONTEXT tokens."""
    tokens = tokens[: CONTEXT + 1]
    output = target(input_ids=tokens[None, :-1], use_cache=False, output_hidden_states=True)
    features = torch.cat([output.hidden_states[i + 1] for i in layers], dim=-1)
    likely = output.logits[0].topk(min(TEACHER_TOKENS, output.logits.shape[-1]))
    return Text(start, tokens, features[0].bfloat16(), likely.indices, likely.values.bfloat16())


def token_counts(texts: Sequence[Text], vocab_size: int) -> Tensor:
    """Returns tokens' expected counts in the answers, float [V]."""
    counts = torch.zeros(vocab_size)
    for text in texts:
        answer = slice(text.start - 1, None)
        probs = text.logits[answer].float().softmax(-1)
        counts.index_add_(0, text.likely[answer].flatten(), probs.flatten())
    return counts


def batches_of(texts: Sequence[Text]) -> list[list[Text]]:
    """Groups sorted texts into batches of at most CONTEXT padded tokens."""
    batches: list[list[Text]] = [[]]
    for text in texts:
        if batches[-1] and len(text.tokens) * (len(batches[-1]) + 1) > CONTEXT:
            batches.append([])
        batches[-1].append(text)
    return batches


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Returns an early, a middle and a late layer: the defaults of SGLang and vLLM for at least 6 layers."""
    return (1, num_layers // 2 - 1, num_layers - 4) if num_layers >= 6 else tuple(range(num_layers - 1))


def new_head(target: Any, layers: tuple[int, ...], target_ids: Tensor, intermediate_size: int) -> EagleHead:
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": 10000.0,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
    }
    head = EagleHead(sizes, target.get_input_embeddings(), target.get_output_embeddings(), layers, target_ids)
    # A good start for the output layer: the highest layer's states under the target's own norm.
    norm = getattr(getattr(target.get_decoder(), "norm", None), "weight", None)
    with torch.no_grad():
        head.fc.weight.zero_()[:, -config.hidden_size :].fill_diagonal_(1.0)
        if norm is not None:
            head.norm.weight.copy_(norm)
    return head


class Unrolled:
    """Attention of a head that drafts from several positions at once, each in a separate branch.

    The first pass is causal over all positions. In pass m the row of root t is m tokens further; it sees the first
    pass's rows up to t, and its branch's rows of later passes.

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
    """Returns the head's states in each of UNROLLED passes. The first has all positions, [B, T, H], where `head.logits`
    of row t predicts token t + 2; pass m has the roots, [B, R, H], and predicts tokens roots + 2 + m.

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


def places(is_learnt: Tensor, seed: int) -> Tensor:
    """Returns random roots, int64 [B, BRANCHES]: trained positions [B, T], not the first, with tokens for each pass."""
    fits = is_learnt.clone()
    fits[:, 0] = False
    fits[:, :-1] &= is_learnt[:, 1:]  # padding
    fits[:, fits.shape[1] - UNROLLED - 1 :] = False
    fits[~fits.any(1), 1] = True  # texts that are too short train nothing
    generator = torch.Generator().manual_seed(seed)
    return fits.float().multinomial(BRANCHES, replacement=True, generator=generator)


class Loss(nn.Module):
    """The loss of a head on a batch. answers_only: excludes prompts."""

    def __init__(self, head: EagleHead, answers_only: bool) -> None:
        super().__init__()
        self.head, self.answers_only = head, answers_only
        # Each token's index in the draft vocabulary, -1 for others.
        self.index = torch.full((head.config.vocab_size,), -1)
        self.index[head.target_ids] = torch.arange(head.vocab_size)

    def forward(self, batch: Sequence[Text], seed: int) -> Tensor:
        tokens, features, likely, logits = (
            pad_sequence([getattr(text, name) for text in batch], batch_first=True)
            for name in ("tokens", "features", "likely", "logits")
        )
        place = torch.arange(tokens.shape[1] - 1)
        is_learnt = place < torch.tensor([[len(text.tokens) - 1] for text in batch])
        if self.answers_only:
            is_learnt &= place >= torch.tensor([[text.start - 1] for text in batch])
        roots = places(is_learnt, seed)
        # The teacher covers the draft vocabulary; positions whose likeliest token is outside are skipped.
        likely = self.index[likely]
        probs = logits.float().masked_fill(likely < 0, -torch.inf).softmax(-1)
        is_learnt &= likely[..., 0] >= 0
        rows, loss = torch.arange(len(batch))[:, None], torch.zeros(())
        features = features.to(self.head.output_rows.dtype)
        for m, states in enumerate(unrolled_states(self.head, tokens, features, roots)):
            at = rows, torch.arange(1, states.shape[1])[None] if m == 0 else roots + 1 + m
            chosen = is_learnt[at]
            log_probs = self.head.logits(states[:, : chosen.shape[1]][chosen]).log_softmax(-1, dtype=torch.float32)
            losses = -(log_probs.gather(-1, likely.clamp(min=0)[at][chosen]) * probs[at][chosen]).sum(-1)
            loss = loss + DECAY**m * losses.sum() / chosen.sum().clamp(min=1)
        return loss / sum(DECAY**m for m in range(UNROLLED))


def fit(loss: Loss, batches: Sequence[Sequence[Text]], steps: int) -> None:
    """Each epoch has all batches in a random order."""
    parameters = [*loss.parameters()]
    matrices, vectors = [x for x in parameters if x.ndim > 1], [x for x in parameters if x.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    warmup, mean, began = max(1, min(100, steps // 10)), 0.0, time.monotonic()
    for step in range(steps):
        # A linear warm-up, then a cosine down to a twentieth.
        cosine = 0.5 * (1 + math.cos(math.pi * (step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * cosine)
        epoch, number = divmod(step, len(batches))
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(SEED + epoch))
        # Computed in the target's dtype; trained weights stay in fp32.
        rounded = {name: weight.to(loss.head.output_rows.dtype) for name, weight in loss.named_parameters()}
        value = torch.func.functional_call(loss, rounded, (batches[int(order[number])], SEED + step))
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean += (value.item() - mean) / min(step + 1, 50)
        if (step + 1) % 20 == 0 or step + 1 == steps:
            left = (time.monotonic() - began) / (step + 1) * (steps - step - 1) / 60
            print(f"step {step + 1}  loss {mean:.3f}, {left:.0f} minutes left", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="checkpoint folder or name of a causal model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON list of texts (default: %(default)s)")
    parser.add_argument("--held-out", type=Path, help="as --prompts: for the trial at the end")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--answers-only", action="store_true", help="do not learn the prompts")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, faster where the CPU has it")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="the most frequent tokens (default %(default)s)")
    parser.add_argument("--intermediate-size", type=int, help="default: half of the target's hidden size")
    without = "leave out the output layer, which is rows of the target's; only pagedtree can load such a head"
    parser.add_argument("--needs-target", action="store_true", help=without)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    dtype = torch.bfloat16 if args.bf16 else "auto"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval().requires_grad_(False)
    config = target.config.get_text_config()
    layers = default_layers(config.num_hidden_layers)

    def token_ids(prompts: Sequence[str]) -> list[list[int]]:
        is_chat = bool(tokenizer.chat_template)
        return [chat_ids(tokenizer, text) if is_chat else tokenizer.encode(text) for text in prompts]

    texts = answers(target, layers, token_ids(read_prompts(args.prompts)), args.max_new_tokens)
    counts = token_counts(texts, config.vocab_size)
    ids = counts.argsort(descending=True, stable=True)[: args.draft_vocab].sort().values
    print(f"{len(texts)} texts; {len(ids)} draft tokens, {counts[ids].sum() / counts.sum():.2%} of the answers")
    head = new_head(target, layers, ids, args.intermediate_size or config.hidden_size // 2)
    fit(Loss(head, args.answers_only), batches_of(texts), args.steps)
    head.save_pretrained(args.out, needs_target=args.needs_target)
    saved = EagleHead.from_pretrained(args.out, target)  # rounded
    tried = token_ids(read_prompts(args.held_out) if args.held_out else [prompt.text for prompt in held_out()])
    drafters = {"n-grams": NgramDrafter(16), "the head": EagleDrafter(saved, num_nodes=8, depth=4, width=2)}
    for name, drafter in drafters.items():
        _, stats = generate(target, tried, drafter=drafter, max_new_tokens=min(96, args.max_new_tokens), rule="greedy")
        print(f"trees of {name}: {stats.mean_accepted:.2f} accepted drafts a step", flush=True)


if __name__ == "__main__":
    main()
