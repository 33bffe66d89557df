"""What programs share that train a drafter for a target: where its texts come from, the optimizer, progress, and how
many drafts are accepted on prompts that it never saw.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from own_texts import Text, own_texts
from prompt_files import Messages, read_prompts, token_ids
from stdlib_text import prompts as stdlib_prompts
from stdlib_text import read, training_files
from torch import Tensor, nn
from training_text import SEED, Answers, Windows
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from pagedtree.integrations.transformers import Drafter, NgramDrafter, generate

__all__ = [
    "DrafterTraining", "Recipe", "accepted_drafts", "arguments", "attention_sizes", "cross_entropy", "encode", "fit",
    "is_smoke", "recipe_of", "train_drafter",
]  # fmt: skip

# A run of fewer steps is a smoke test: it reads a part of the text and evaluates on little.
SMOKE_STEPS = 20
Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids, by the kind of prompt


@dataclass(frozen=True)
class Recipe:
    """batch * context tokens are in a step; no text is longer than `context`."""

    steps: int
    learning_rate: float
    batch: int = 4
    context: int = 512


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Makes the parser with the arguments that every program that trains takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoints")
    parser.add_argument("--steps", type=int, help="instead of each stage's own number")
    parser.add_argument("--minutes", type=float, help="end after so many minutes of training at the latest")
    parser.add_argument("--save-minutes", type=float, default=10.0, help="time between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, faster where the CPU has it")
    return parser


def is_smoke(args: argparse.Namespace) -> bool:
    return args.steps is not None and args.steps < SMOKE_STEPS


def recipe_of(default: Recipe, args: argparse.Namespace) -> Recipe:
    if args.steps is None:
        return default
    return replace(default, steps=args.steps, context=128 if is_smoke(args) else default.context)


def learning_rate(recipe: Recipe, step: int, done: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth. done: the part of the whole run that is over."""
    warmup = max(1, min(100, recipe.steps // 10))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return recipe.learning_rate * min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * cosine)


def cross_entropy(logits: Tensor, tokens: Tensor, probs: Tensor) -> Tensor:
    """Cross entropy to a teacher's distribution over some tokens: logits [..., V], tokens, probs [..., K] -> [...]."""
    return -(logits.log_softmax(-1, dtype=torch.float32).gather(-1, tokens) * probs).sum(-1)


def fit(
    name: str,
    module: nn.Module,
    loss_of: Callable[[int], Tensor],
    save: Callable[[], None],
    recipe: Recipe,
    args: argparse.Namespace,
) -> None:
    """Trains `module`; every `args.save_minutes`, saves it (and what `save` does besides) and all that resuming needs.

    loss_of: the loss of a step, by its number. ValueError for a run that was begun as another one.
    """
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    state_file = args.out / ".state" / f"{name}.pt"
    constants = hashlib.sha256(b"".join(x.numpy().tobytes() for x in module.buffers())).hexdigest()  # draft tokens
    begun_as = repr((recipe, [tuple(p.shape) for p in module.parameters()], constants))
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
        print(f"{name}: resumed at step {step}")

    def checkpoint() -> None:
        state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "begun_as": begun_as}
        state |= {"step": step, "minutes": spent + (time.monotonic() - began) / 60}
        state_file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, state_file.with_suffix(".tmp"))
        state_file.with_suffix(".tmp").replace(state_file)
        save()

    module.train()
    parameters, batch_tokens = sum(p.numel() for p in module.parameters()), recipe.batch * recipe.context
    print(f"{name}: {parameters:,} parameters, steps {step} to {recipe.steps} of {batch_tokens} tokens")
    began = saved = time.monotonic()
    first, mean_loss = step, 0.0
    done_before = max(step / recipe.steps, spent / args.minutes if args.minutes else 0.0)
    while step < recipe.steps:
        minutes = spent + (time.monotonic() - began) / 60
        done = max(step / recipe.steps, minutes / args.minutes if args.minutes else 0.0)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, done)
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss += (loss.item() - mean_loss) / min(step - first + 1, 50)
        step += 1
        if step % 20 == 0 or step == recipe.steps:
            left = (minutes - spent) * (1 - done) / max(done - done_before, 1e-9)
            print(f"{name}: step {step}  loss {mean_loss:.3f}, {left:.0f} minutes left", flush=True)
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


def encode(tokenizer: Any, files: Sequence[Path]) -> Tensor:
    """The files one after the other, each between BOS and EOS."""
    rows = tokenizer([read(file) for file in files], verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in [*row, tokenizer.eos_token_id]])


def attention_sizes(target: Any) -> tuple[int, int, int]:
    """The target's query heads, KV heads, and their size."""
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, head_dim


class DrafterTraining(ABC):
    """One kind of drafter, as `train_drafter` trains it.

    Attributes:
        name: what it is called in messages, and the folder that it is written into.
        recipe: for the toy; own_recipe: for a target's own answers.
        args: what the user chose, `args.target` None for the toy.
    """

    name: str
    recipe: Recipe
    own_recipe: Recipe
    args: argparse.Namespace

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Sizes that a user may choose."""

    @abstractmethod
    def layers(self, target: Any) -> tuple[int, ...]:
        """Whose outputs the drafter reads."""

    @abstractmethod
    def new(self, target: Any, tokenizer: Any, source: Windows | Answers) -> nn.Module:
        """The module before training, its own weights in fp32. The loss is computed in the target's dtype."""

    @abstractmethod
    def loss_of(self, module: Any, source: Windows | Answers) -> Callable[[int], Tensor]:
        """The loss of a step, by its number."""

    @abstractmethod
    def save(self, module: Any, folder: Path) -> None:
        """Writes the module."""

    @abstractmethod
    def drafter(self, folder: Path, target: Any) -> Drafter:
        """Loads what was written, rounded as it is there, as a drafter for the target."""

    @abstractmethod
    def report(self, drafter: Any, target: Any, texts: Sequence[Text]) -> None:
        """Prints how often each level guesses what the target chose in these greedy answers."""


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


def train_drafter(training: DrafterTraining, description: str | None, argv: Sequence[str] | None = None) -> None:
    """The whole of a program that trains one drafter."""
    args = training.args = _drafter_arguments(training, description).parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    smoke = is_smoke(args)
    folder = args.target or str(args.out / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if args.bf16 else "auto" if args.target else torch.float32
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)
    layers, state = training.layers(target), args.out / ".state"
    recipe = recipe_of(training.own_recipe if args.target else training.recipe, args)
    if args.target:
        asked, held_out = _asked(tokenizer, args)
        texts = own_texts(target, asked, state / "answers.jsonl", args.max_new_tokens, args.temperatures)
        source = Answers(target, layers, texts, state, recipe.batch * recipe.context, recipe.context)
        print(f"{len(texts)} texts, {source.num_tokens:,} tokens of answers")
    else:
        files = training_files()[::16] if smoke else training_files()
        source = Windows(target, layers, encode(tokenizer, files), recipe.batch, recipe.context)
        held_out = {"code": [tokenizer.encode(text) for text in stdlib_prompts(2 if smoke else 30, seed=SEED)]}
    module, out = training.new(target, tokenizer, source), args.out / training.name

    few = {kind: prompts[:4] for kind, prompts in held_out.items()}
    length = 16 if smoke else 96

    def save() -> None:
        training.save(module, out)
        _show_accepted(training.name, target, few, training.drafter(out, target), length)

    rounded = _Rounded(module, training.loss_of(module, source), target.dtype)
    fit(training.name, module, rounded.loss, save, recipe, args)
    greedy = [prompt for prompts in held_out.values() for prompt in prompts]
    drafter = training.drafter(out, target)
    training.report(drafter, target, own_texts(target, greedy, state / "answers.jsonl", 16 if smoke else 128, [0.0]))
    _show_accepted("n-gram tree", target, held_out, NgramDrafter(16), length)
    _show_accepted(training.name, target, held_out, drafter, length)


def _drafter_arguments(training: DrafterTraining, description: str | None) -> argparse.ArgumentParser:
    parser = arguments(description)
    parser.add_argument("--target", help="checkpoint folder or name of a causal model (default: the toy in OUT/target)")
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
    training.add_arguments(parser)
    return parser


def _asked(tokenizer: Any, args: argparse.Namespace) -> tuple[list[list[int]], Prompts]:
    """Prompts to learn from, and those to try, by their kind."""
    chat = bool(tokenizer.chat_template) if args.chat is None else args.chat
    asked = read_prompts(args.prompts) if args.prompts else _training_prompts()
    held_out = {"prompts": read_prompts(args.held_out)} if args.held_out else _held_out_prompts()
    asked = asked[: args.num_prompts]
    if is_smoke(args):
        asked, held_out = asked[:8], {kind: prompts[:1] for kind, prompts in held_out.items()}
    return token_ids(tokenizer, asked, chat), {
        kind: token_ids(tokenizer, prompts, chat) for kind, prompts in held_out.items()
    }


def _training_prompts() -> list[Messages]:
    from prompts.training import training_prompts

    return [[{"role": "user", "content": prompt.text}] for prompt in training_prompts()]


def _held_out_prompts() -> dict[str, list[Messages]]:
    from real_prompts import KINDS, held_out

    return {kind: [[{"role": "user", "content": prompt.text}] for prompt in held_out(kind)] for kind in KINDS}
