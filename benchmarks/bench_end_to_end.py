"""Whole generations on the demo's models: transformers' own beside ours, with and without drafts, by batch size.

python -m pagedtree bench end_to_end [--batch 1 2 4 8 16 32 64] [--max-new-tokens 96] [--rounds 7] [--pairs 15]
    [--device cuda] [--json PATH]

Candidates take turns, each round in another order; tokens a second are the median over the rounds, prompts included.
Trees are fixed, or chosen by `generate(tree="auto")`, whose drafter keeps what it learnt from round to round ("auto")
or starts anew in each ("auto from scratch"). transformers' assisted generation and prompt lookup take one sequence. All
greedy, in fp32, without an end of text; a text that differs from plain decoding is told.

That trees which are chosen cost next to nothing takes a better look: `--pairs` generations, each beside one of plain
decoding, the two taking turns step by step, on a CPU with one thread each; and as many of plain decoding beside itself,
to see what the machine adds.
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
from lockstep import OnStep, Player, in_lockstep
from measure import machine_facts, median_interval, save
from suite import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from pagedtree.integrations.transformers import GenerationStats, ModelDrafter, NgramDrafter, generate

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from stdlib_text import prompts as stdlib_prompts  # noqa: E402

PLAIN = "pagedtree, plain"
FIRST_TOKENS = 4
Tokens = list[list[int]]
Candidate = Callable[..., tuple[Tokens, GenerationStats | None]]


def candidates(target: Any, draft: Any, tokenizer: Any, batch: Tokens, count: int) -> dict[str, Candidate]:
    padded = tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt").to(target.device)

    def theirs(**options: Any) -> tuple[Tokens, None]:
        out = target.generate(**padded, do_sample=False, max_new_tokens=count, **options)
        return out[:, padded["input_ids"].shape[1] :].tolist(), None

    def ours(
        drafter: Any = None, tree: str | None = None, on_step: OnStep | None = None
    ) -> tuple[Tokens, GenerationStats]:
        out, stats = generate(target, batch, drafter=drafter, tree=tree, max_new_tokens=count, on_step=on_step)
        return [row[len(prompt) :].tolist() for row, prompt in zip(out, batch, strict=True)], stats

    drafters = {
        "n-gram tree": lambda: NgramDrafter(16, max_branches=6, max_depth=8),
        "draft-model tree": lambda: ModelDrafter(draft, num_nodes=16, depth=5, width=3),
    }
    found: dict[str, Candidate] = {"transformers": theirs}
    if len(batch) == 1:
        found["transformers, assisted"] = lambda: theirs(assistant_model=draft)
        found["transformers, prompt lookup"] = lambda: theirs(prompt_lookup_num_tokens=8)
    found[PLAIN] = ours
    for name, make in drafters.items():
        found[f"pagedtree, {name}"] = partial(ours, make())
        found[f"pagedtree, {name}, auto"] = partial(ours, make(), "auto")
        found[f"pagedtree, {name}, auto from scratch"] = lambda make=make, **options: ours(make(), "auto", **options)  # type: ignore[misc]
    return found


def in_rounds(batch_size: int, run: dict[str, Candidate], rounds: int) -> list[dict[str, Any]]:
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
        if (figures := stats[name]) is not None:
            row |= {
                "tokens_per_step": figures.tokens_per_step,
                "first_token_ms": statistics.median(first_tokens[name]),
                "steps": figures.steps,
            }
        rows.append(row)
    return rows


def in_pairs(
    target: Any, batch_size: int, run: dict[str, Candidate], run_first: dict[str, Candidate], pairs: int
) -> list[dict[str, Any]]:
    """Of plain decoding, and where trees are chosen: speed and time to the first token over plain decoding's.

    run_first: candidates for a single token; FIRST_TOKENS pairs of them, as one step scatters more than a hundred do.
    """
    names = [name for name in run if name == PLAIN or ", auto" in name]
    speed, first_token, drafted = defaultdict(list), defaultdict(list), defaultdict(list)

    def pair(run: dict[str, Candidate], name: str, turn: int) -> tuple[Player, Player]:
        both = [lambda on_step, name=name: run[name](on_step=on_step) for name in (PLAIN, name)]  # type: ignore[misc]
        return in_lockstep(target, *both) if turn % 2 else in_lockstep(target, *both[::-1])[::-1]  # type: ignore[return-value]

    for turn in range(pairs):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            plain, other = pair(run, name, turn)
            stats = other.result[1]
            speed[name].append(plain.seconds / other.seconds)
            drafted[name].append(stats.drafted_steps / stats.steps)
            firsts = [pair(run_first, name, turn + again) for again in range(FIRST_TOKENS)]
            first_token[name].append(
                statistics.geometric_mean(
                    sum(other.first_tokens.values()) / sum(plain.first_tokens.values()) for plain, other in firsts
                )
            )
    return [
        {
            "batch": batch_size,
            "name": name,
            "pairs": speed[name],
            "over_plain": median_interval(speed[name]),
            "first_token_over_plain": median_interval(first_token[name]),
            "drafted_steps": statistics.median(drafted[name]),
        }
        for name in names
    ]


def _keep_memory() -> None:
    """Freed memory stays with the process: else it is by chance which caches get pages that are still to be zeroed."""
    mallopt, trim_threshold, mmap_threshold = getattr(ctypes.CDLL(None), "mallopt", None), -1, -3  # of glibc
    if mallopt is not None:
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="where to write; default benchmarks/results/end_to_end_DEVICE.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _keep_memory()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = EXAMPLES / "checkpoints"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval().to(args.device)
        for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    for model in (target, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    facts = machine_facts() | {"arguments": {key: value for key, value in vars(args).items() if key != "json"}}
    texts = [tokenizer(text).input_ids for text in stdlib_prompts(max(args.batch))]
    for warm_up in candidates(target, draft, tokenizer, texts[:1], 8).values():
        warm_up()
    bar, rows, paired = Progress(len(args.batch)), [], []
    for batch_size in args.batch:
        bar.show(f"batch {batch_size}")
        run, run_first = (
            candidates(target, draft, tokenizer, texts[:batch_size], count) for count in (args.max_new_tokens, 1)
        )
        rows += (found := in_rounds(batch_size, run, args.rounds))
        paired += (pairs := in_pairs(target, batch_size, run, run_first, args.pairs))
        bar.clear()
        bar.done += 1
        for row in found:
            rate = f"{row['tokens_per_second']:9.1f} tokens/s  {row['over_plain']:.2f} x plain"
            print(f"{row['batch']:4} {row['name']:45} {rate}{'' if row['identical'] else '  OTHER TEXT'}", flush=True)
        for row in pairs:
            speed, first_token = (
                f"{middle:.3f} ({low:.3f} to {high:.3f})"
                for low, middle, high in (row["over_plain"], row["first_token_over_plain"])
            )
            print(
                f"{row['batch']:4} {row['name']:45} in pairs: {speed} x plain, first token {first_token} x", flush=True
            )
    save(f"end_to_end_{args.device}", rows, facts | {"paired": paired}, args.json)
    return 1 if any(not row["identical"] for row in rows if row["name"].startswith("pagedtree")) else 0


if __name__ == "__main__":
    sys.exit(main())
