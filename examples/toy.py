"""All drafters and rules on the small models of this folder: same text, speed, acceptance.

    python examples/toy.py [--device cuda] [--dtype bfloat16] [--prompts 6] [--max-new-tokens 96] [--json PATH]

First one sequence is generated without drafts and with its fastest drafter, then all prompts as one batch over a paged
cache. The first table has tokens per sequence and step, accepted draft tokens, tokens per second over all sequences,
time to the first token, and equality with plain decoding, greedy and sampled. In fp32 a difference is an error (exit
code 1); in half precision the first one is shown with the margin of the two likeliest tokens. The second table has
rules that compare target and draft probabilities: their texts follow the distribution of plain sampling, but differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from live import compare_live, fastest, first_difference
from stdlib_text import prompts as stdlib_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree import SamplingParams
from pagedtree.generation.drafters import (
    BlockDrafter,
    BlockDraftModel,
    Drafter,
    EagleDrafter,
    EagleHead,
    MedusaDrafter,
    MedusaHeads,
    NgramDrafter,
)
from pagedtree.integrations.transformers import GenerationStats, ModelDrafter, generate

CHECKPOINTS = Path(__file__).parent / "checkpoints"
PAGE_SIZE = 16
TRIAL_TOKENS = 96


Row = dict[str, Any]  # of a table


def row_of(sampling: str, drafter: str, stats: GenerationStats, identical: bool | None) -> Row:
    """identical: the text equals plain decoding's; None: the rule does not promise it."""
    return {
        "sampling": sampling,
        "drafter": drafter,
        "tokens_per_step": stats.tokens_per_step,
        "accepted_length": stats.mean_accepted,
        "tokens_per_second": stats.tokens_per_second,
        "time_to_first_token_ms": stats.time_to_first_token * 1e3,
        "identical": identical,
    }


def load(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Callable[[], Drafter | None]]]:
    """Returns the target, the draft model, and makers of the first table's drafters."""
    dtype = getattr(torch, args.dtype)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(args.checkpoints / name, dtype=dtype).to(args.device).eval()
        for name in ("target", "draft")
    )
    heads = MedusaHeads.from_pretrained(args.checkpoints / "medusa", target)
    head = EagleHead.from_pretrained(args.checkpoints / "eagle", target)
    block = BlockDraftModel.from_pretrained(args.checkpoints / "block", target)
    drafters: dict[str, Callable[[], Drafter | None]] = {
        "plain": lambda: None,
        "n-gram chain": lambda: NgramDrafter(8, max_branches=1),
        "n-gram tree": lambda: NgramDrafter(16, max_branches=6, max_depth=8),
        "Medusa tree": lambda: MedusaDrafter(heads, 16),
        "EAGLE-3 tree": lambda: EagleDrafter(head, num_nodes=16, depth=5, width=3),
        "block tree": lambda: BlockDrafter(block, num_nodes=16),
        "draft-model tree": lambda: ModelDrafter(draft, num_nodes=16, depth=5, width=3),
    }
    return target, draft, drafters


# Drafters of the second table, and their rules.
RULES = {
    "top-k tree": ("rejection", "typical"),
    "drawn chain": ("rejection", "block"),
    "drawn tree": ("rejection", "traversal"),
    "coupled tree": ("sampled",),
}


def rule_drafters(draft: Any) -> dict[str, Callable[[], Drafter]]:
    tree = {"num_nodes": 16, "branching": [3, 2, 1]}
    return {
        "top-k tree": lambda: ModelDrafter(draft, num_nodes=16, depth=5, width=3),
        "drawn chain": lambda: ModelDrafter(draft, law="iid", num_nodes=5, depth=4, width=1),
        "drawn tree": lambda: ModelDrafter(draft, law="swor", **tree),
        "coupled tree": lambda: ModelDrafter(draft, law="coupled", **tree),
    }


def same_text(plain: Sequence[Tensor], drafted: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(plain, drafted, strict=True))


def print_table(rows: list[Row]) -> None:
    verdicts = {True: "yes", False: "NO", None: "-"}
    head = f"{'sampling':18} {'drafter':24} {'tokens/step':>11} {'accepted':>9} {'tokens/s':>9} {'TTFT ms':>8}"
    print(f"\n{head}  identical")
    for row in rows:
        print(
            f"{row['sampling']:18} {row['drafter']:24} {row['tokens_per_step']:11.2f} {row['accepted_length']:9.2f}"
            f" {row['tokens_per_second']:9.1f} {row['time_to_first_token_ms']:8.0f}  {verdicts[row['identical']]}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--checkpoints", type=Path, default=CHECKPOINTS, help="folder with target, draft, medusa, eagle and block"
    )
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--live-tokens", type=int, default=256, help="tokens of the one sequence that comes first")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--json", type=Path, help="write the table here too")
    args = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()

    model, draft, drafters = load(args)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoints / "target")
    texts = stdlib_prompts(args.prompts)
    batch = [torch.tensor(tokenizer(text).input_ids, device=args.device) for text in texts]
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {args.dtype}, {args.device};"
        f" {len(batch)} prompts of {min(map(len, batch))} to {max(map(len, batch))} tokens, page size {PAGE_SIZE}"
    )

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    samplings = {
        "greedy": None,
        f"T {args.temperature:g}, top-p {args.top_p:g}": SamplingParams(temperature=args.temperature, top_p=args.top_p),
    }
    generate(model, batch, max_new_tokens=4)  # warm-up
    tried = {name: make for name, make in drafters.items() if name != "plain"}
    best = fastest(model, batch[0], tried, max_new_tokens=TRIAL_TOKENS)
    print(
        f"\none sequence: a prompt of {len(batch[0])} tokens and {args.live_tokens} more, without drafts and then with"
    )
    print(f"the drafter that was fastest of {len(tried)} on the first {TRIAL_TOKENS} tokens, {best}:")
    ways = {name: drafters[name] for name in ("plain", best)}
    alone, drafted = compare_live(model, batch[0], ways, decode, max_new_tokens=args.live_tokens)
    is_wrong = not torch.equal(alone, drafted)
    if is_wrong:
        print(f"  first difference: {first_difference([alone], [drafted], model)}")
    print(f"\nall {len(batch)} prompts in one batch, {args.max_new_tokens} tokens each:", flush=True)

    def complete(drafter: Drafter | None, params: SamplingParams | None, rule: str = "auto") -> tuple[Any, Any]:
        print(f"  {sampling}: {name}, {rule} ...", file=sys.stderr)
        how = {"max_new_tokens": args.max_new_tokens, "params": params, "page_size": PAGE_SIZE, "rule": rule}
        return generate(model, batch, drafter=drafter, **how)

    rows: list[Row] = []
    completions = []
    for sampling, params in samplings.items():
        plain: Sequence[Tensor] = ()
        for name, make in drafters.items():
            sequences, stats = complete(make(), params)
            plain = plain or sequences
            rows.append(row_of(sampling, name, stats, same_text(plain, sequences)))
            if not rows[-1]["identical"]:
                print(f"  {sampling}, {name}: first difference: {first_difference(plain, sequences, model)}")
        completions.append(decode(plain[0][len(batch[0]) :].tolist()))
    rule_rows: list[Row] = []
    makers = rule_drafters(draft)
    for name, rule in ((name, rule) for name, rules in RULES.items() for rule in rules):
        sequences, stats = complete(makers[name](), params, rule)
        identical = same_text(plain, sequences) if rule == "sampled" else None
        rule_rows.append(row_of(sampling, f"{name}, {rule}", stats, identical))
    print_table(rows)
    print_table(rule_rows)
    print("typical is lossy: it favours likely drafts. The other rules preserve the distribution of the text.")
    rows += rule_rows
    print(f"\nprompt 0 ends:\n{texts[0][-200:]}\n--- greedy completion:\n{completions[0]}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    is_wrong |= any(row["identical"] is False for row in rows)
    if is_wrong and args.dtype == "float32":
        print("output differs from plain decoding", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
