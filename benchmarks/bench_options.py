"""What request options cost in verification, beside the same verification without them.

python benchmarks/bench_options.py [--json PATH] [--batch 8] [--tree "Medusa 64"] [--vocab 128256] [--budget 20]

The logits, trees and drafts are those of the verification points of bench_ops.py; the same drafts are accepted with and
without options up to the few that options forbid, which rows report as `accepted`. Prompts have 2000 random tokens and
outputs 500, as text that repeats itself little.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import as_row, interleaved, machine_facts, save
from named_trees import tree_named
from torch import Tensor
from verify_peers import Problem, Rule, sampled, seeded_tokens

from pagedtree import RequestOptions, SamplingParams, Verdict, verify_rejection, verify_sampled

COPIES = 2  # of the logits, of which each is larger than a last cache
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}


@dataclass(frozen=True)
class Asked:
    """Options as a call takes them."""

    penalties: dict[str, float]
    options: RequestOptions | None
    grammar_mask: Tensor | None = None


def options_of(problem: Problem) -> dict[str, Asked]:
    """Each kind of option, and all of them."""
    batch, vocab = problem.batch, problem.vocab
    generator = torch.Generator().manual_seed(0)

    def texts(length: int) -> list[list[int]]:
        return torch.randint(vocab, (batch, length), generator=generator).tolist()

    words = torch.randint(vocab, (20, 2), generator=generator).tolist()
    every = RequestOptions.from_lists(
        vocab,
        prompts=texts(2000),
        outputs=texts(500),
        allowed=[list(range(vocab - 256))] * batch,
        bias=[dict.fromkeys(torch.randint(vocab, (32,), generator=generator).tolist(), 1.0)] * batch,
        bad_words=[words] * batch,
        stop_ids=[[vocab - 1, vocab - 2]] * batch,
        min_positions=[1 << 30] * batch,
    )

    def only(*names: str) -> RequestOptions:
        return RequestOptions(**{name: getattr(every, name) for name in names})

    counts = only("prompt_mask", "output_counts")
    grammar = torch.full((problem.rows, -(-vocab // 32)), -1, dtype=torch.int32)
    return {
        "none": Asked({}, None),
        "presence and frequency": Asked({k: PENALTIES[k] for k in ("presence_penalty", "frequency_penalty")}, counts),
        "all penalties": Asked(PENALTIES, counts),
        "bias of 32 tokens": Asked({}, only("bias_tokens", "bias_values", "cu_bias")),
        "20 bad words": Asked(
            {}, only("bad_tokens", "cu_bad_words", "cu_bad_seqs", "history", "history_lens", "history_start")
        ),
        "minimum length": Asked({}, only("stop_ids", "min_position")),
        "allowed tokens": Asked({}, only("allowed_mask")),
        "grammar mask": Asked({}, None, grammar),
        "all": Asked(PENALTIES, every, grammar),
    }


def run(problem: Problem, op: str, params: dict[str, Any], asked: Asked, repeat: int) -> Verdict:
    i = repeat % len(problem.logits)
    streams = {"seeds": problem.seeds, "positions": problem.positions}
    arguments = (problem.logits[i], problem.drafts[i], problem.trees, SamplingParams(**params, **asked.penalties))
    if op == "sampled":
        return verify_sampled(*arguments, **streams, grammar_mask=asked.grammar_mask, options=asked.options)
    return verify_rejection(
        *arguments, draft_law="onehot", **streams, grammar_mask=asked.grammar_mask, options=asked.options
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write; default benchmarks/results/options_cpu.json")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tree", type=tree_named, default="Medusa 64")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument(
        "--budget", type=float, default=20.0, help="seconds for each rule and sampling (default %(default)s)"
    )
    args = parser.parse_args()

    facts = machine_facts() | {"arguments": {**vars(args), "tree": args.tree.num_nodes}}
    rows = []
    for name, params in SAMPLING.items():
        problem = Problem(args.batch, args.tree, args.vocab, torch.bfloat16, COPIES, torch.device("cpu"), params=params)
        rule = Rule("verify_sampled", name, params, sampled, sampled, lambda *_: None, predicted=seeded_tokens)
        problem.draft_for(rule)
        asked = options_of(problem)
        for op in ("sampled", "rejection"):
            calls = {kind: partial(run, problem, op, params, options) for kind, options in asked.items()}
            timings = interleaved(calls, budget=args.budget)
            for kind, timing in timings.items():
                ratio = timing.median / timings["none"].median
                accepted = float(calls[kind](0).num_accepted.double().mean())
                print(f"{op:10} {name:22} {kind:24} {timing.median * 1e3:8.2f} ms {ratio:5.2f} x", flush=True)
                rows.append(
                    {"rule": op, "sampling": name, "options": kind, "ratio": ratio, "accepted": accepted}
                    | as_row(timing)
                )
    save("options_cpu", rows, facts, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
