"""sample and the verify ops beside the chain of torch ops and vLLM's sampler, on one machine, in one run.

    python benchmarks/bench_verify.py [--rules NAME ...] [--batch 8] [--nodes 32] [--vocab 128256] [--json PATH]

The chain is what an engine without a kernel does: temperature, softmax, top-k and top-p with renormalisation over all
rows, a draw from each, then the walk. A row gives the time of a call, the share of the floor (the time to read the
logits of all nodes once at the read bandwidth measured in the same run; verification reads only the visited rows, so
it may take less) and the ratio to each peer. What the peers give is checked before they are timed. vLLM's rejection
sampler verifies chains, and is measured where vLLM is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from itertools import groupby

import ratio_peers
import torch
import verify_peers
from measure import as_row, interleaved, machine_facts, read_bandwidth, save
from verify_peers import Problem, Rule

import pagedtree
from pagedtree import DraftTree

L3_BYTES = 64 << 20
RULES = [*verify_peers.RULES, *ratio_peers.RULES]


def balanced_tree(nodes: int) -> DraftTree:
    return DraftTree([-1] + [(i - 1) // 2 for i in range(1, nodes)])


def bench(rule: Rule, problem: Problem, args: argparse.Namespace, bandwidth: float) -> dict:
    problem.params = rule.params
    rule.check(problem)
    calls = {"pagedtree": rule.run, **({} if args.no_peers else rule.peers)}
    if rule.name in ratio_peers.VLLM_RULES and not args.no_peers:
        if importlib.util.find_spec("vllm"):
            vllm = ratio_peers.VllmRejection()
            vllm.check(problem)
            calls["vLLM"] = vllm
        else:
            print("vLLM: absent")
    candidates = {name: lambda i, run=run: run(problem, i % problem.copies) for name, run in calls.items()}
    timings = interleaved(candidates, budget=args.seconds)
    ours, floor = timings["pagedtree"].median, problem.logit_bytes / bandwidth
    verdict = rule.run(problem, 0)
    row = {
        "rule": rule.name,
        "ms": ours * 1e3,
        "over_floor": ours / floor,
        "ratio": {name: t.median / ours for name, t in timings.items() if name != "pagedtree"},
        "drafts": problem.rows - problem.batch,
        "accepted": int(verdict.num_accepted.sum()) if isinstance(verdict, pagedtree.Verdict) else None,
        "timings": {name: as_row(t) for name, t in timings.items()},
    }
    print(f"{rule.name:40} {row['ms']:9.3f} ms, {row['over_floor']:6.2f} x the floor, ", end="")
    if row["accepted"] is not None:
        print(f"{row['accepted']} of {row['drafts']} accepted, ", end="")
    print("  ".join(f"{name} {ratio:.1f}x" for name, ratio in row["ratio"].items()))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rule.name for rule in RULES]
    parser.add_argument("--rules", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=32, help="of each tree, balanced and binary, or a chain")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=20.0, help="a rule's budget")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="where to write; default benchmarks/results/verify.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = machine_facts()
    bandwidth = read_bandwidth()
    facts |= {"read_gb_per_s": bandwidth / 1e9}
    dtype = getattr(torch, args.dtype)
    size = args.batch * args.nodes * args.vocab * torch.empty(0, dtype=dtype).element_size()
    print(f"{facts['processor']}, {args.threads} threads, {bandwidth / 1e9:.1f} GB/s, logits {size / 2**20:.0f} MB")
    rows = []
    for (problem_of, is_chain), rules in groupby(RULES, key=lambda rule: (rule.problem, rule.is_chain)):
        chosen = [rule for rule in rules if rule.name in args.rules]
        if chosen:
            tree = DraftTree.chain(args.nodes - 1) if is_chain else balanced_tree(args.nodes)
            copies = min(4, -(-L3_BYTES // size) + 1)
            problem = problem_of(args.batch, tree, args.vocab, dtype, copies=copies, params=None)
            rows += [bench(rule, problem, args, bandwidth) for rule in chosen]
    arguments = {name: value for name, value in vars(args).items() if name != "json"}
    save("verify", rows, facts | {"arguments": arguments}, args.json)


if __name__ == "__main__":
    main()
