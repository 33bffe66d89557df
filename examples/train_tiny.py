"""Trains the demo's tiny models on the source of the Python standard library: a Llama of 3.7 M parameters, a draft
Llama and Medusa heads for it, and their tokenizer. One CPU core is enough.

    python examples/train_tiny.py all                     # everything, into examples/checkpoints
    python examples/train_tiny.py draft --out DIR         # one stage; `draft` and `medusa` learn from DIR/target
    python examples/train_tiny.py all --steps 3 --out DIR # a smoke test

A stage that was stopped goes on from its last checkpoint; a finished one is only evaluated again.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from stdlib_text import held_out_files, prompts, read, training_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from pagedtree.integrations.transformers import MedusaHeads

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB_SIZE = 2048
NUM_MEDUSA_HEADS = 4
SEED = 0
# A run of fewer steps is a smoke test: it reads a part of the text and evaluates on little.
SMOKE_STEPS = 20


@dataclass(frozen=True)
class Recipe:
    steps: int
    learning_rate: float
    batch: int = 4
    context: int = 512


RECIPES = {
    "target": Recipe(steps=5000, learning_rate=1.5e-3),
    "draft": Recipe(steps=4000, learning_rate=3e-3),
    "medusa": Recipe(steps=1500, learning_rate=2e-3, batch=2),
}


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def train_tokenizer(path: Path, files: list[Path]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read(file) for file in files), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    # Written by hand: the class that transformers 5 would name here is unknown to transformers 4.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": 4096,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> Tensor:
    """The files one after the other, each between BOS and EOS."""
    rows = tokenizer([read(file) for file in files], verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in [*row, tokenizer.eos_token_id]])


def sample_batch(tokens: Tensor, recipe: Recipe, step: int) -> Tensor:
    """`[batch, context + 1]` windows. They depend on the step alone, so that a resumed run sees what it would have."""
    generator = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(len(tokens) - recipe.context, (recipe.batch, 1), generator=generator)
    return tokens[starts + torch.arange(recipe.context + 1)]


def next_token_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    return -(teacher_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warmup = max(1, min(100, recipe.steps // 10))
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return recipe.learning_rate * min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * cosine)


def fit(
    name: str,
    module: nn.Module,
    loss_of: Callable[[Tensor, int], Tensor],
    save: Callable[[], None],
    tokens: Tensor,
    recipe: Recipe,
    args: argparse.Namespace,
) -> None:
    """Trains `module` on windows of `tokens`; every `args.save_minutes`, saves it and all that resuming needs."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    state_file = args.out / ".state" / f"{name}.pt"
    step = 0
    if state_file.exists():
        state = torch.load(state_file)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"{name}: resumed at step {step}")

    def checkpoint() -> None:
        state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state_file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, state_file.with_suffix(".tmp"))
        state_file.with_suffix(".tmp").replace(state_file)
        save()

    module.train()
    parameters, batch_tokens = sum(p.numel() for p in module.parameters()), recipe.batch * recipe.context
    print(f"{name}: {parameters:,} parameters, steps {step} to {recipe.steps} of {batch_tokens} tokens")
    began = saved = time.monotonic()
    first, mean_loss = step, 0.0
    while step < recipe.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = loss_of(sample_batch(tokens, recipe, step), step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.item() if step == first else 0.98 * mean_loss + 0.02 * loss.item()
        step += 1
        now = time.monotonic()
        if step % 20 == 0 or step == recipe.steps:
            print(f"{name}: step {step}  loss {mean_loss:.3f}  {(now - began) / (step - first):.2f} s/step", flush=True)
        if step == recipe.steps or now - saved > 60 * args.save_minutes:
            checkpoint()
            saved = now
    module.eval()


def save_llama(model: LlamaForCausalLM, path: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(path)


def load_llama(path: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


def train_target(tokens: Tensor, recipe: Recipe, args: argparse.Namespace) -> None:
    model = llama(hidden=256, intermediate=768, layers=4, heads=4, kv_heads=2)

    def loss_of(batch: Tensor, step: int) -> Tensor:
        return next_token_loss(model, batch)

    fit("target", model, loss_of, lambda: save_llama(model, args.out / "target"), tokens, recipe, args)


def train_draft(tokens: Tensor, recipe: Recipe, args: argparse.Namespace) -> None:
    """Half of the steps on the text, the rest on the target's distribution: to agree with it is its job."""
    model = llama(hidden=128, intermediate=384, layers=2, heads=2, kv_heads=1)

    @functools.cache  # The first part does without the target, and so can run while that is being trained.
    def target() -> LlamaForCausalLM:
        return load_llama(args.out / "target")

    def loss_of(batch: Tensor, step: int) -> Tensor:
        if step < recipe.steps // 2:
            return next_token_loss(model, batch)
        inputs = batch[:, :-1]
        with torch.no_grad():
            teacher_logits = target()(inputs, use_cache=False).logits.float()
        return soft_cross_entropy(model(inputs, use_cache=False).logits.float(), teacher_logits)

    fit("draft", model, loss_of, lambda: save_llama(model, args.out / "draft"), tokens, recipe, args)


def train_medusa(tokens: Tensor, recipe: Recipe, args: argparse.Namespace) -> None:
    """Head i learns, at each position, the distribution that the target has i + 1 positions later."""
    target = load_llama(args.out / "target")
    heads = MedusaHeads(target.config.hidden_size, NUM_MEDUSA_HEADS, target.lm_head)

    def loss_of(batch: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            hidden = target.model(batch[:, :-1], use_cache=False).last_hidden_state
            teacher_logits = target.lm_head(hidden).float()
        positions = hidden.shape[1] - NUM_MEDUSA_HEADS
        later = [teacher_logits[:, i + 1 : i + 1 + positions] for i in range(NUM_MEDUSA_HEADS)]
        return soft_cross_entropy(heads(hidden[:, :positions]).float(), torch.stack(later, dim=2))

    fit("medusa", heads, loss_of, lambda: heads.save_pretrained(args.out / "medusa"), tokens, recipe, args)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: Tensor, context: int) -> float:
    """Mean loss in nats per token, over windows that do not overlap."""
    total = 0.0
    for window in tokens[1:].split(context):
        inputs = torch.cat([tokens[:1], window[:-1]])
        total += F.cross_entropy(model(inputs[None], use_cache=False).logits[0], window, reduction="sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def greedy_continuations(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, smoke: bool
) -> list[tuple[int, Tensor]]:
    """Prompts with the target's greedy continuation: the prompt's length and all the tokens, `[1, length]`."""
    count, new_tokens = (2, 16) if smoke else (30, 128)
    rows = []
    for prompt in prompts(count, seed=SEED):
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        rows.append((inputs["input_ids"].shape[1], tokens))
    return rows


def evaluate_llama(name: str, model: LlamaForCausalLM, held_out: Tensor, context: int, smoke: bool) -> None:
    tokens = held_out[: 4 * context] if smoke else held_out
    loss = held_out_loss(model, tokens, context)
    num_bytes = sum(len(read(file).encode()) for file in held_out_files())
    bits_per_byte = loss / math.log(2) * len(held_out) / num_bytes
    print(f"{name}: held-out loss {loss:.3f} nats per token, {bits_per_byte:.3f} bits per byte")


@torch.no_grad()
def evaluate_draft(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: Tensor, greedy: list[tuple[int, Tensor]], context: int
) -> None:
    windows = held_out[: len(held_out) // context * context].view(-1, context)[:64]
    agreement = [(target(row[None]).logits.argmax(-1) == draft(row[None]).logits.argmax(-1)).float() for row in windows]
    print(f"draft: agrees with the target's argmax on {torch.cat(agreement).mean():.1%} of held-out text")
    hits = [draft(tokens).logits.argmax(-1)[0, start - 1 : -1] == tokens[0, start:] for start, tokens in greedy]
    print(f"draft: agrees with the target's argmax on {torch.cat(hits).float().mean():.1%} of its greedy continuations")


@torch.no_grad()
def evaluate_medusa(target: LlamaForCausalLM, heads: MedusaHeads, greedy: list[tuple[int, Tensor]]) -> None:
    for i in range(heads.num_heads):
        hits = []
        for start, tokens in greedy:
            hidden = target.model(tokens).last_hidden_state[0]
            guesses = heads(hidden)[:, i].topk(3).indices
            # From the prompt's last position on, every token that the head names is one that the target chose.
            expected = tokens[0, start + 1 + i :]
            hits.append(guesses[start - 1 : start - 1 + len(expected)] == expected[:, None])
        top = torch.cat(hits).float().mean(0).cumsum(0)
        print(f"medusa: head {i} on the target's greedy continuations: top-1 {top[0]:.1%}, top-3 {top[2]:.1%}")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every script that trains takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoints")
    parser.add_argument("--steps", type=int, help="instead of each stage's own number")
    parser.add_argument("--save-minutes", type=float, default=10.0, help="time between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="multiply in bfloat16, faster where the CPU has it")
    return parser


def is_smoke(args: argparse.Namespace) -> bool:
    return args.steps is not None and args.steps < SMOKE_STEPS


def recipe_of(default: Recipe, args: argparse.Namespace) -> Recipe:
    if args.steps is None:
        return default
    return Recipe(args.steps, default.learning_rate, default.batch, 128 if is_smoke(args) else default.context)


def train_drafter(
    description: str | None,
    default: Recipe,
    train: Callable[[LlamaForCausalLM, Tensor, Recipe, argparse.Namespace], None],
    evaluate: Callable[[LlamaForCausalLM, Path, list[tuple[int, Tensor]]], None],
) -> None:
    """What a script does that trains one drafter for the target.

    train(target, tokens, recipe, args) writes it into the folder args.out; evaluate(target, args.out, greedy) then
    reads what was written, rounded as it is there.
    """
    args = arguments(description).parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    smoke = is_smoke(args)
    tokenizer = AutoTokenizer.from_pretrained(args.out / "target")
    target = load_llama(args.out / "target")
    files = training_files()[::16] if smoke else training_files()
    train(target, encode(tokenizer, files), recipe_of(default, args), args)
    evaluate(target, args.out, greedy_continuations(target, tokenizer, smoke))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("stage", choices=["tokenizer", *RECIPES, "all"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    smoke = is_smoke(args)

    def recipe(stage: str) -> Recipe:
        return recipe_of(RECIPES[stage], args)

    files = training_files()[::16] if smoke else training_files()
    stages = ["tokenizer", *RECIPES] if args.stage == "all" else [args.stage]
    if "tokenizer" in stages and not (args.out / "target" / "tokenizer.json").exists():
        train_tokenizer(args.out / "target", files)
        shutil.copytree(args.out / "target", args.out / "draft", dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.out / "target")
    if args.stage == "tokenizer":
        return
    tokens, held_out = encode(tokenizer, files), encode(tokenizer, held_out_files())
    print(f"{len(tokens):,} tokens of training text, {len(held_out):,} held out")
    if "target" in stages:
        train_target(tokens, recipe("target"), args)
    if "draft" in stages:
        train_draft(tokens, recipe("draft"), args)
    if "medusa" in stages:
        train_medusa(tokens, recipe("medusa"), args)

    # What is evaluated is what was written, rounded as it is there.
    target, context = load_llama(args.out / "target"), recipe("target").context
    greedy = greedy_continuations(target, tokenizer, smoke)
    if "target" in stages:
        evaluate_llama("target", target, held_out, context, smoke)
    if "draft" in stages:
        draft = load_llama(args.out / "draft")
        evaluate_llama("draft", draft, held_out, context, smoke)
        evaluate_draft(target, draft, held_out, greedy, context)
    if "medusa" in stages:
        evaluate_medusa(target, MedusaHeads.from_pretrained(args.out / "medusa", target), greedy)


if __name__ == "__main__":
    main()
