"""Trains the toy's tiny models on the source of the Python standard library: a Llama of 3.7 M parameters, a draft
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
from collections.abc import Callable
from pathlib import Path

import torch
from head_training import Recipe, arguments, encode, fit, is_smoke, recipe_of
from stdlib_text import held_out_files, prompts, read, training_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from training_text import SEED
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from pagedtree.integrations.transformers import MedusaHeads

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB_SIZE = 2048
NUM_MEDUSA_HEADS = 4


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
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)
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


def sample_batch(tokens: Tensor, recipe: Recipe, step: int) -> Tensor:
    """`[batch, context + 1]` windows. They depend on the step alone, so that a resumed run sees what it would have."""
    generator = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(len(tokens) - recipe.context, (recipe.batch, 1), generator=generator)
    return tokens[starts + torch.arange(recipe.context + 1)]


def rounded(loss_of: Callable[[int], Tensor], bf16: bool) -> Callable[[int], Tensor]:
    """Multiplies in bfloat16, if wanted."""

    def loss(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return loss_of(step)

    return loss


def next_token_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    return -(teacher_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def save_llama(model: LlamaForCausalLM, path: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(path)


def load_llama(path: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


def train_target(tokens: Tensor, recipe: Recipe, args: argparse.Namespace) -> None:
    model = llama(hidden=256, intermediate=768, layers=4, heads=4, kv_heads=2)

    def loss_of(step: int) -> Tensor:
        batch = sample_batch(tokens, recipe, step)
        return next_token_loss(model, batch)

    fit("target", model, rounded(loss_of, args.bf16), lambda: save_llama(model, args.out / "target"), recipe, args)


def train_draft(tokens: Tensor, recipe: Recipe, args: argparse.Namespace) -> None:
    """Half of the steps on the text, the rest on the target's distribution: to agree with it is its job."""
    model = llama(hidden=128, intermediate=384, layers=2, heads=2, kv_heads=1)

    @functools.cache  # The first part does without the target, and so can run while that is being trained.
    def target() -> LlamaForCausalLM:
        return load_llama(args.out / "target")

    def loss_of(step: int) -> Tensor:
        batch = sample_batch(tokens, recipe, step)
        if step < recipe.steps // 2:
            return next_token_loss(model, batch)
        inputs = batch[:, :-1]
        with torch.no_grad():
            teacher_logits = target()(inputs, use_cache=False).logits.float()
        return soft_cross_entropy(model(inputs, use_cache=False).logits.float(), teacher_logits)

    fit("draft", model, rounded(loss_of, args.bf16), lambda: save_llama(model, args.out / "draft"), recipe, args)


def train_medusa(tokens: Tensor, recipe: Recipe, args: argparse.Namespace) -> None:
    """Head i learns, at each position, the distribution that the target has i + 1 positions later."""
    target = load_llama(args.out / "target")
    heads = MedusaHeads(target.config.hidden_size, NUM_MEDUSA_HEADS, target.lm_head)

    def loss_of(step: int) -> Tensor:
        batch = sample_batch(tokens, recipe, step)
        with torch.no_grad():
            hidden = target.model(batch[:, :-1], use_cache=False).last_hidden_state
            teacher_logits = target.lm_head(hidden).float()
        positions = hidden.shape[1] - NUM_MEDUSA_HEADS
        later = [teacher_logits[:, i + 1 : i + 1 + positions] for i in range(NUM_MEDUSA_HEADS)]
        return soft_cross_entropy(heads(hidden[:, :positions]).float(), torch.stack(later, dim=2))

    fit("medusa", heads, rounded(loss_of, args.bf16), lambda: heads.save_pretrained(args.out / "medusa"), recipe, args)


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
        (args.out / "draft").mkdir(exist_ok=True)
        shutil.copy(args.out / "target" / "tokenizer_config.json", args.out / "draft")
        link = args.out / "draft" / "tokenizer.json"
        link.unlink(missing_ok=True)
        link.symlink_to("../target/tokenizer.json")
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
