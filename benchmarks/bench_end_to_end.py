"""Whole generations on the toy's models: transformers' own beside ours, with and without drafts, by batch size.

python -m pagedtree bench end_to_end [--batch 1 2 4 8 16 32 64] [--max-new-tokens 96] [--rounds 7]
    [--drafters NAME ...] [--device cuda] [--json PATH]

Candidates take turns, each round in another order; tokens per second are the median over the rounds, prompts included.
Trees are fixed, or chosen by `generate(tree="auto")`, whose drafter keeps what it learnt from round to round ("auto")
or starts anew in each ("auto from scratch"); bench_chosen_trees.py takes a closer look at those. transformers' assisted
generation and prompt lookup take one sequence. All is greedy, in fp32, without an end of text; a text that differs from
plain decoding is reported.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lockstep import OnStep
from measure import machine_facts, save
from suite import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from pagedtree import DraftTree
from pagedtree.integrations.transformers import (
    BlockDrafter,
    BlockDraftModel,
    CombinedDrafter,
    EagleDrafter,
    EagleHead,
    GenerationStats,
    MedusaDrafter,
    MedusaHeads,
    ModelDrafter,
    NgramDrafter,
    generate,
)

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from stdlib_text import prompts as stdlib_prompts  # noqa: E402

CHECKPOINTS = EXAMPLES / "checkpoints"
PLAIN = "pagedtree, plain"
Tokens = list[list[int]]
Candidate = Callable[..., tuple[Tokens, GenerationStats | None]]
Maker = Callable[[], Any]


def ways(target: Any, tokenizer: Any, batch: Tokens, count: int) -> tuple[Candidate, Candidate]:
    """transformers' own generation and ours; each takes its options."""
    padded = tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt").to(target.device)

    def theirs(**options: Any) -> tuple[Tokens, None]:
        out = target.generate(**padded, do_sample=False, max_new_tokens=count, **options)
        return out[:, padded["input_ids"].shape[1] :].tolist(), None

    def ours(
        drafter: Any = None, tree: str | None = None, on_step: OnStep | None = None, batch: Tokens = batch
    ) -> tuple[Tokens, GenerationStats]:
        out, stats = generate(target, batch, drafter=drafter, tree=tree, max_new_tokens=count, on_step=on_step)
        return [row[len(prompt) :].tolist() for row, prompt in zip(out, batch, strict=True)], stats

    return theirs, ours


def drafters(target: Any, draft: Any, wanted: list[str] | None = None) -> dict[str, tuple[Maker, Maker]]:
    """Name -> what makes the drafter of chains and that of trees, for names that have one of the `wanted` parts."""
    heads = MedusaHeads.from_pretrained(CHECKPOINTS / "medusa", target)
    head = EagleHead.from_pretrained(CHECKPOINTS / "eagle", target)
    block = BlockDraftModel.from_pretrained(CHECKPOINTS / "block", target)
    tree = {"num_nodes": 16, "depth": 5, "width": 3}
    chain, short = {"num_nodes": 6, "depth": 5, "width": 1}, {"num_nodes": 4, "depth": 3, "width": 1}
    every: dict[str, tuple[Maker, Maker]] = {
        "n-gram": (lambda: NgramDrafter(8, max_branches=1), lambda: NgramDrafter(16, max_branches=6, max_depth=8)),
        "Medusa": (lambda: MedusaDrafter(heads, DraftTree.chain(4)), lambda: MedusaDrafter(heads, 16)),
        "EAGLE-3": (lambda: EagleDrafter(head, **chain), lambda: EagleDrafter(head, **tree)),
        "block": (lambda: BlockDrafter(block, **chain), lambda: BlockDrafter(block, num_nodes=16)),
        "draft-model": (lambda: ModelDrafter(draft, **chain), lambda: ModelDrafter(draft, **tree)),
        "n-gram and EAGLE-3": (
            lambda: CombinedDrafter(EagleDrafter(head, **short)),
            lambda: CombinedDrafter(EagleDrafter(head, **tree)),
        ),
        "n-gram and draft-model": (
            lambda: CombinedDrafter(ModelDrafter(draft, **short)),
            lambda: CombinedDrafter(ModelDrafter(draft, **tree)),
        ),
    }
    return {
        name: both
        for name, both in every.items()
        if wanted is None or any(part.lower() in name.lower() for part in wanted)
    }


def candidates(
    target: Any, draft: Any, tokenizer: Any, batch: Tokens, count: int, makers: dict[str, tuple[Maker, Maker]]
) -> dict[str, Candidate]:
    theirs, ours = ways(target, tokenizer, batch, count)
    found: dict[str, Candidate] = {"transformers": theirs}
    if len(batch) == 1:
        found["transformers, assisted"] = lambda: theirs(assistant_model=draft)
        found["transformers, prompt lookup"] = lambda: theirs(prompt_lookup_num_tokens=8)
    found[PLAIN] = ours
    for name, (chain, tree) in makers.items():
        found[f"pagedtree, {name} chain"] = partial(ours, chain())
        found[f"pagedtree, {name} tree"] = partial(ours, tree())
        found[f"pagedtree, {name} tree, auto"] = partial(ours, tree(), "auto")
        found[f"pagedtree, {name} tree, auto from scratch"] = lambda make=tree, **options: ours(  # type: ignore[misc]
            make(), "auto", **options
        )
    return found


def in_rounds(
    batch_size: int, run: dict[str, Candidate], rounds: int, explain: Callable[[Tokens, Tokens], str] | None = None
) -> list[dict[str, Any]]:
    """A row for each candidate; `explain` tells how a text differs from plain decoding's."""
    rates, first_tokens = defaultdict(list), defaultdict(list)
    texts: dict[str, Tokens] = {}
    stats: dict[str, GenerationStats | None] = {}
    names = list(run)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            texts[name], stats[name] = run[name]()
            rates[name].append(sum(map(len, texts[name])) / (time.perf_counter() - begin))
            if (figures := stats[name]) is not None:
                first_tokens[name].append(figures.time_to_first_token * 1e3)
    rows = []
    for name in names:
        row = {
            "batch": batch_size,
            "name": name,
            "tokens_per_second": statistics.median(rates[name]),
            "rounds": rates[name],
            "over_plain": statistics.median(a / b for a, b in zip(rates[name], rates[PLAIN], strict=True)),
            "identical": texts[name] == texts[PLAIN],
        }
        if explain is not None and not row["identical"]:
            row["difference"] = explain(texts[PLAIN], texts[name])
        if (figures := stats[name]) is not None:
            row |= {
                "tokens_per_step": figures.tokens_per_step,
                "first_token_ms": statistics.median(first_tokens[name]),
                "steps": figures.steps,
            }
        rows.append(row)
    return rows


def keep_memory() -> None:
    """Freed memory stays with the process: else it is by chance which caches get pages that are still to be zeroed."""
    mallopt, trim_threshold, mmap_threshold = getattr(ctypes.CDLL(None), "mallopt", None), -1, -3  # of glibc
    if mallopt is not None:
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def loaded(args: argparse.Namespace, dtype: torch.dtype, num_texts: int = 0) -> tuple[Any, Any, Any, Tokens]:
    """The toy's target, draft model and tokenizer, and prompts, at least one for each sequence; no text ends."""
    keep_memory()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, draft = (
        AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=dtype).eval().to(args.device)
        for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "target")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    for model in (target, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return target, draft, tokenizer, [tokenizer(text).input_ids for text in stdlib_prompts(max(*args.batch, num_texts))]


def prepare(
    args: argparse.Namespace, num_texts: int = 0
) -> tuple[Any, Tokens, Callable[[int, int], dict[str, Candidate]], dict[str, Any]]:
    """The target; the prompts; the candidates for a batch size and so many tokens, warmed up; what else to save.

    No text ends.
    """
    target, draft, tokenizer, texts = loaded(args, torch.float32, num_texts)
    makers = drafters(target, draft, args.drafters)

    def candidates_of(batch_size: int, count: int) -> dict[str, Candidate]:
        return candidates(target, draft, tokenizer, texts[:batch_size], count, makers)

    for warm_up in candidates_of(1, 8).values():
        warm_up()
    return target, texts, candidates_of, facts_of(args)


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    return machine_facts() | {"arguments": {key: value for key, value in vars(args).items() if key != "json"}}


def arguments(description: str, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--drafters", nargs="*", help="parts of the names of those wanted; default all")
    parser.add_argument("--json", help=f"where to write; default benchmarks/results/{name}_DEVICE.json")
    return parser


def by_batch_size(
    sizes: list[int], rows_of: Callable[[int], list[dict[str, Any]]], keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """The rows of `in_rounds` for each batch size, printed as they come; `keep` gets all so far."""
    bar, rows = Progress(len(sizes)), []
    for batch_size in sizes:
        bar.show(f"batch {batch_size}")
        rows += (found := rows_of(batch_size))
        bar.clear()
        keep(rows)
        bar.done += 1
        for row in found:
            rate = f"{row['tokens_per_second']:9.1f} tokens/s  {row['over_plain']:.2f} x plain"
            other = "" if row["identical"] else f"  OTHER TEXT {row.get('difference', '')}"
            print(f"{row['batch']:4} {row['name']:45} {rate}{other.rstrip()}", flush=True)
    return rows


def main() -> int:
    parser = arguments(__doc__, "end_to_end")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _, _, candidates_of, facts = prepare(args)
    rows = by_batch_size(
        args.batch,
        lambda size: in_rounds(size, candidates_of(size, args.max_new_tokens), args.rounds),
        lambda rows: save(f"end_to_end_{args.device}", rows, facts, args.json),
    )
    return 1 if any(not row["identical"] for row in rows if row["name"].startswith("pagedtree")) else 0


if __name__ == "__main__":
    sys.exit(main())
