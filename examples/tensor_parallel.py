"""The toy's target over four processes, its draft model on one or two of them: the text of a single process.

    python examples/tensor_parallel.py [--ranks 4] [--draft-ranks 1 2] [--prompts 2] [--max-new-tokens 16] [--json PATH]

Each process has a part of the target (transformers' tensor-parallel plan) and its columns of the logits, which
`pagedtree.distributed` verifies without gathering them. The table has equality with one process's text, accepted draft
tokens per step, milliseconds of drafting per token, and bytes sent in verification against bytes to gather the logits.
Exit code 1 if a text differs. "rejection" follows the distribution of plain sampling; its text may differ where a coin
is within rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from stdlib_text import prompts as stdlib_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from pagedtree import SamplingParams
from pagedtree.distributed import DraftGroup, Traffic, VocabShards
from pagedtree.generation.drafters import Drafter, StepResult
from pagedtree.integrations.transformers import ModelDrafter, generate, tensor_parallel

CHECKPOINTS = Path(__file__).parent / "checkpoints"
PARAMS = SamplingParams(temperature=0.8, top_p=0.9)
RULES: dict[str, SamplingParams | None] = {"greedy": None, "sampled": PARAMS, "rejection": PARAMS}
TIMEOUT = timedelta(seconds=300)
PRELOADED = ["transformers.models.llama.modeling_llama", "pagedtree.distributed", "pagedtree.integrations.transformers"]


@dataclass
class Row:
    rule: str
    draft_ranks: int
    identical: bool
    accepted: float
    proposal_ms_per_token: float
    bytes_sent: int
    bytes_to_gather: int


def load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float32).eval()


def make_drafter(rule: str, group: dist.ProcessGroup | None = None) -> Drafter:
    """The draft model is split over `group`."""
    model = load("draft")
    if group is not None:
        tensor_parallel(model, group=group, gather_logits=True)
    if rule == "rejection":
        return ModelDrafter(model, law="swor", num_nodes=16, branching=[3, 2, 1])
    return ModelDrafter(model, num_nodes=16, depth=5, width=3)


def run(args: argparse.Namespace, prompts: list[list[int]], target: Any, rule: str, **options: Any) -> tuple[Any, Any]:
    # Chosen trees depend on measured costs, and "rejection" texts depend on trees.
    options |= {"max_new_tokens": args.max_new_tokens, "eos_token_id": [], "tree": None}
    return generate(target, prompts, params=RULES[rule], rule=rule, **options)


def run_rank(rank: int, args: argparse.Namespace, prompts: list[list[int]], folder: str) -> None:
    torch.set_num_threads(max((os.cpu_count() or 1) // args.ranks, 1))
    logging.disable_progress_bar()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.ranks, timeout=TIMEOUT)
    target = load("target")
    shards = tensor_parallel(target)
    results = []
    for size in args.draft_ranks:
        for rule in RULES:
            results.append(run_group(args, prompts, target, shards, rule, size))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_group(
    args: argparse.Namespace, prompts: list[list[int]], target: Any, shards: VocabShards, rule: str, size: int
) -> tuple[list[list[int]], Row]:
    drafts = DraftGroup(lambda group: make_drafter(rule, group), size, shards=shards)
    shards.traffic, verified = Traffic(), list[int]()

    def on_step(result: StepResult) -> None:
        verified.append(result.logits.shape[0])

    sequences, stats = run(args, prompts, target, rule, drafter=drafts, shards=shards, on_step=on_step)
    row = Row(
        rule=rule,
        draft_ranks=size,
        identical=True,
        accepted=stats.mean_accepted,
        proposal_ms_per_token=drafts.stats.ms_per_token,
        bytes_sent=shards.traffic.bytes_sent(args.ranks),
        bytes_to_gather=shards.gather_bytes(sum(verified), torch.float32),
    )
    return [sequence.tolist() for sequence in sequences], row


def compare(args: argparse.Namespace, prompts: list[list[int]], folder: str) -> list[Row]:
    """Returns the ranks' rows, with texts compared to this process alone."""
    logging.disable_progress_bar()
    target = load("target")
    alone = {}
    for rule in RULES:
        sequences, _ = run(args, prompts, target, rule, drafter=make_drafter(rule))
        alone[rule] = [sequence.tolist() for sequence in sequences]
    of_rank = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(args.ranks)]
    rows = []
    for results in zip(*of_rank, strict=True):
        row = results[0][1]
        row.identical = all(text == alone[row.rule] for text, _ in results)
        rows.append(row)
    return rows


def print_rows(rows: list[Row]) -> None:
    print("rule       draft on identical accepted ms per token    sent to gather")
    for row in rows:
        sent, gather = (f"{size / 1024:.0f} KiB" for size in (row.bytes_sent, row.bytes_to_gather))
        print(
            f"{row.rule:<10} {'TP ' + str(row.draft_ranks):>8} {'yes' if row.identical else 'NO':>9}"
            f" {row.accepted:8.2f} {row.proposal_ms_per_token:10.2f} {sent:>9} {gather:>9}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--draft-ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "target")
    prompts = [tokenizer(text)["input_ids"] for text in stdlib_prompts(args.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        # Ranks fork from a process that has imported these once.
        mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
        start: Callable[..., Any] = mp.start_processes
        start(run_rank, args=(args, prompts, folder), nprocs=args.ranks, start_method="forkserver")
        rows = compare(args, prompts, folder)
    print_rows(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.identical for row in rows if row.rule != "rejection") else 1


if __name__ == "__main__":
    raise SystemExit(main())
