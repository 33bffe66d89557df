"""Trains an EAGLE-3 head for a causal language model of transformers, from the model's own answers to prompts.

    python examples/train_head.py --target FOLDER --out DIR --bf16      # into DIR/eagle
    python examples/train_head.py --target FOLDER --out DIR --prompts FILE --held-out FILE
    python examples/train_head.py --target FOLDER --out DIR --steps 3   # a smoke test

A run that was stopped goes on from its last checkpoint, and nothing is answered or read twice; a finished one is only
evaluated again. docs/your_model.md goes through it step by step.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from own_texts import Text, own_texts
from prompt_files import question, read_prompts, token_ids
from prompts.training import training_prompts
from real_prompts import KINDS, held_out
from torch import Tensor, nn
from torch.nn import functional as F
from training_text import SEED, Answers, Batch, layer_outputs
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from pagedtree.integrations.transformers import Drafter, EagleDrafter, EagleHead, NgramDrafter, generate

LEARNING_RATE = 2e-3
# Tokens of a step, and of the longest text.
CONTEXT, SMOKE_CONTEXT = 768, 128
# A run of fewer steps is a smoke test: it evaluates on little.
SMOKE_STEPS = 20
# Training-time test: the head reads its own states so many times, each weighed less than the one before.
UNROLLED, DECAY = 4, 0.8
# At so many random places of each text of a batch; the first time, at all places.
BRANCHES = 64
Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids, by the kind of prompt


# The head and its loss ------------------------------------------------------------------------------------------------


def default_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late one: those that SGLang and vLLM take by themselves, if there are as many."""
    if num_layers < 6:
        return tuple(range(max(num_layers - 1, 1)))
    return 1, num_layers // 2 - 1, num_layers - 4


def attention_sizes(target: Any) -> tuple[int, int, int]:
    """The target's query heads, KV heads, and their size."""
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, head_dim


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


def cross_entropy(logits: Tensor, tokens: Tensor, probs: Tensor) -> Tensor:
    """Cross entropy to a teacher's distribution over some tokens: logits [..., V], tokens, probs [..., K] -> [...]."""
    return -(logits.log_softmax(-1, dtype=torch.float32).gather(-1, tokens) * probs).sum(-1)


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


# Training -------------------------------------------------------------------------------------------------------------


def learning_rate(steps: int, step: int, done: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth. done: the part of the whole run that is over."""
    warmup = max(1, min(100, steps // 10))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return LEARNING_RATE * min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * cosine)


def fit(
    module: nn.Module, loss_of: Callable[[int], Tensor], save: Callable[[], None], args: argparse.Namespace
) -> None:
    """Trains `module`; every `args.save_minutes`, saves it (and what `save` does besides) and all that resuming needs.

    loss_of: the loss of a step, by its number. ValueError for a run that was begun as another one.
    """
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    state_file = args.out / ".state" / "eagle.pt"
    constants = hashlib.sha256(b"".join(x.numpy().tobytes() for x in module.buffers())).hexdigest()  # draft tokens
    begun_as = repr((args.steps, CONTEXT, [tuple(p.shape) for p in module.parameters()], constants))
    step, spent = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file)
        if state["begun_as"] != begun_as:
            raise ValueError(
                f"{state_file}: expected a run of the same steps, sizes and draft tokens; delete it to begin anew"
            )
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent = state["step"], state["minutes"]
        print(f"eagle: resumed at step {step}")

    def checkpoint() -> None:
        state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "begun_as": begun_as}
        state |= {"step": step, "minutes": spent + (time.monotonic() - began) / 60}
        state_file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, state_file.with_suffix(".tmp"))
        state_file.with_suffix(".tmp").replace(state_file)
        save()

    module.train()
    print(f"eagle: {sum(p.numel() for p in module.parameters()):,} parameters, steps {step} to {args.steps}")
    began = saved = time.monotonic()
    first, mean_loss = step, 0.0
    done_before = max(step / args.steps, spent / args.minutes if args.minutes else 0.0)
    while step < args.steps:
        minutes = spent + (time.monotonic() - began) / 60
        done = max(step / args.steps, minutes / args.minutes if args.minutes else 0.0)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.steps, step, done)
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss += (loss.item() - mean_loss) / min(step - first + 1, 50)
        step += 1
        if step % 20 == 0 or step == args.steps:
            left = (minutes - spent) * (1 - done) / max(done - done_before, 1e-9)
            print(f"eagle: step {step}  loss {mean_loss:.3f}, {left:.0f} minutes left", flush=True)
        if time.monotonic() - saved > 60 * args.save_minutes:
            checkpoint()
            saved = time.monotonic()
    checkpoint()
    module.eval()


class _Rounded(nn.Module):
    """Computes the loss with weights in another dtype than the one that they are trained in."""

    def __init__(self, module: nn.Module, loss_of: Callable[[int], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self._loss_of, self._dtype = module, loss_of, dtype

    def loss(self, step: int) -> Tensor:
        rounded = {name: weight.to(self._dtype) for name, weight in self.named_parameters()}
        loss: Tensor = torch.func.functional_call(self, rounded, (step,))
        return loss

    def forward(self, step: int) -> Tensor:
        return self._loss_of(step)


# The program ----------------------------------------------------------------------------------------------------------


def accepted_drafts(target: Any, prompts: Prompts, drafter: Drafter, max_new_tokens: int) -> dict[str, float]:
    """Measures the mean number of accepted drafts of a tree, for each kind of prompts."""
    found = {}
    for kind, tokens in prompts.items():
        _, stats = generate(target, tokens, drafter=drafter, max_new_tokens=max_new_tokens, rule="greedy")
        steps = [count for sequence in stats.sequences for count in sequence.accepted]
        found[kind] = sum(steps) / max(len(steps), 1)
    return found


def _show_accepted(name: str, target: Any, prompts: Prompts, drafter: Drafter, max_new_tokens: int) -> None:
    found = accepted_drafts(target, prompts, drafter, max_new_tokens)
    shown = ", ".join(f"{kind} {mean:.2f}" for kind, mean in found.items())
    print(f"{name}: accepted drafts in a tree: {shown}", flush=True)


@torch.no_grad()
def show_guesses(head: EagleHead, target: Any, texts: Sequence[Text]) -> None:
    """Prints how often each pass names the token that the target chose, if those before it were right."""
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


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    smoke, state, out = args.steps < SMOKE_STEPS, args.out / ".state", args.out / "eagle"
    context = SMOKE_CONTEXT if smoke else CONTEXT
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    dtype = torch.bfloat16 if args.bf16 else "auto"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval().requires_grad_(False)
    layers = tuple(args.feature_layers or default_layers(target.config.get_text_config().num_hidden_layers))
    asked, tried = _asked(tokenizer, args, smoke)
    texts = own_texts(target, asked, state / "answers.jsonl", args.max_new_tokens, args.temperatures)
    source = Answers(target, layers, texts, state, context, context)
    print(f"{len(texts)} texts, {source.num_tokens:,} tokens of answers")

    ids = source.frequencies.argsort(descending=True, stable=True)[: args.draft_vocab].sort().values
    share = source.frequencies[ids].sum() / source.frequencies.sum()
    print(f"eagle: {len(ids)} draft tokens, {share:.2%} of the text")
    size = args.intermediate_size or target.config.get_text_config().hidden_size // 2
    head = new_head(target, layers, ids, size, tuple(args.heads or attention_sizes(target)))
    index = torch.full((head.config.vocab_size,), -1)
    index[ids] = torch.arange(len(ids))
    few = {kind: prompts[:4] for kind, prompts in tried.items()}
    length = 16 if smoke else 96

    def saved() -> EagleDrafter:
        """As it was saved, rounded."""
        nodes, depth, width = args.tree
        return EagleDrafter(EagleHead.from_pretrained(out, target), num_nodes=nodes, depth=depth, width=width)

    def save() -> None:
        head.save_pretrained(out, needs_target=args.needs_target)
        _show_accepted("eagle", target, few, saved(), length)

    rounded = _Rounded(head, lambda step: unrolled_loss(head, source.batch(step), index, SEED + step), target.dtype)
    fit(head, rounded.loss, save, args)
    greedy = [prompt for prompts in tried.values() for prompt in prompts]
    drafter, texts_of = saved(), own_texts(target, greedy, state / "answers.jsonl", 16 if smoke else 128, [0.0])
    show_guesses(drafter.head, target, texts_of)
    _show_accepted("n-gram tree", target, tried, NgramDrafter(16), length)
    _show_accepted("eagle", target, tried, drafter, length)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="checkpoint folder or name of a causal model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, help="end after so many minutes of training at the latest")
    parser.add_argument("--save-minutes", type=float, default=10.0, help="time between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, faster where the CPU has it")
    parser.add_argument("--prompts", type=Path, help="what it is asked: .json, .jsonl or a text in each line")
    parser.add_argument("--num-prompts", type=int, help="only so many of them, the first ones")
    parser.add_argument("--held-out", type=Path, help="prompts on which the drafter is tried; they are not learnt from")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=(0.0, 0.8), help="at each of which every prompt is answered"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of each answer")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if there is one)"
    )
    parser.add_argument("--draft-vocab", type=int, default=8192, help="the most frequent tokens (default %(default)s)")
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
    return parser


def _asked(tokenizer: Any, args: argparse.Namespace, smoke: bool) -> tuple[list[list[int]], Prompts]:
    """Prompts to learn from, and those to try, by their kind."""
    chat = bool(tokenizer.chat_template) if args.chat is None else args.chat
    learnt = read_prompts(args.prompts) if args.prompts else [question(prompt.text) for prompt in training_prompts()]
    tried = {kind: [question(prompt.text) for prompt in held_out(kind)] for kind in KINDS}
    tried = {"prompts": read_prompts(args.held_out)} if args.held_out else tried
    learnt = learnt[: args.num_prompts]
    if smoke:
        learnt, tried = learnt[:8], {kind: prompts[:1] for kind, prompts in tried.items()}
    return token_ids(tokenizer, learnt, chat), {
        kind: token_ids(tokenizer, prompts, chat) for kind, prompts in tried.items()
    }


if __name__ == "__main__":
    main()
