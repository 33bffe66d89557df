"""tree_attention beside its peers on one machine, in one run.

    python benchmarks/bench_tree_attention.py [--device cuda] [--shapes B4_L4096_T32 ...] [--peers NAME ...]
        [--json PATH]

A row gives the time of a call, GB/s of the keys and values read, GFLOP/s, the fraction of the floor (the larger of
bytes over measured read bandwidth and flops over the measured rate of matmul, in fp32 or in the cache's type, whichever
is faster) and the ratio to each peer. The floor's rates are measured in the same run. A peer's output is compared with
ours before it is timed.
"""

from __future__ import annotations

import argparse
import re

import torch
from attention_peers import PEERS, Problem
from measure import as_row, interleaved, interleaved_on_gpu, machine_facts, matmul_rate, read_bandwidth, save

import pagedtree

DEFAULT_SHAPES = {
    "cpu": ["B4_L4096_T32", "B8_L2048_T1", "B2_L2048_T128", "B1_L32768_T16"],
    "cuda": [
        *("B1_L8192_T16", "B16_L8192_T1", "B16_L8192_T8", "B32_L4096_T16", "B8_L8192_T64", "B1_L65536_T16"),
        *("B8_L4096_T128", "B4_L4096_T512"),
    ],
}
CACHE_BYTES = {"cpu": 64 << 20, "cuda": 128 << 20}  # copies of the data must exceed it


def tree_of(nodes: int) -> pagedtree.DraftTree:
    """A balanced binary tree; a chain for one or two nodes."""
    return pagedtree.DraftTree([-1] + [(i - 1) // 2 for i in range(1, nodes)])


def parse_shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"B(\d+)_L(\d+)_T(\d+)", text)
    if match is None:
        raise SystemExit(f"shape: expected B<batch>_L<length>_T<nodes>, got {text}")
    batch, length, nodes = (int(group) for group in match.groups())
    return batch, length, nodes


def make_problem(shape: str, args: argparse.Namespace) -> Problem:
    batch, length, nodes = parse_shape(shape)
    dtype = getattr(torch, args.dtype)
    size = 2 * batch * length * args.kv_heads * args.head_dim * torch.empty(0, dtype=dtype).element_size()
    copies = min(8, -(-CACHE_BYTES[args.device] // size) + 1)
    return Problem(
        batch, length, tree_of(nodes), args.heads, args.kv_heads, args.head_dim, args.page_size, dtype, copies,
        torch.device(args.device),
    )  # fmt: skip


def check(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    error = (out.float() - expected.float()).abs().max().item()
    if not error <= 0.03:
        raise SystemExit(f"{name}: output differs from pagedtree's by {error}")


def bench_shape(shape: str, args: argparse.Namespace, bandwidth: float, flop_rate: float) -> dict:
    problem = make_problem(shape, args)
    candidates, absent = {}, {}
    expected: dict[str, torch.Tensor] = {}
    for peer in PEERS:
        if args.peers and peer.name not in ("pagedtree", *args.peers):
            continue
        reason = peer.absent()
        if reason is None:
            try:
                instance = peer(problem)
                out = instance.run(0)
            except Exception as error:  # a peer that cannot run this shape is named, not hidden
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if reason is not None:
            absent[peer.name] = reason
            continue
        check(peer.name, out, expected.setdefault(peer.mask, out.clone()))
        candidates[peer.name] = lambda i, run=instance.run: run(i % problem.copies)
    if args.device == "cuda":
        timings = interleaved_on_gpu(candidates, copies=problem.copies, budget=args.seconds)
    else:
        timings = interleaved(candidates, budget=args.seconds)
    ours = timings["pagedtree"].median
    floor = max(problem.kv_bytes / bandwidth, problem.flops / flop_rate)
    row = {
        "shape": shape,
        "ms": ours * 1e3,
        "gb_per_s": problem.kv_bytes / ours / 1e9,
        "gflop_per_s": problem.flops / ours / 1e9,
        "floor_fraction": floor / ours,
        "bandwidth_fraction": problem.kv_bytes / bandwidth / ours,
        "ratio": {name: t.median / ours for name, t in timings.items() if name != "pagedtree"},
        "timings": {name: as_row(t) for name, t in timings.items()},
        "absent": absent,
    }
    print(f"{shape:16} {row['ms']:9.3f} ms {row['gb_per_s']:7.2f} GB/s {row['gflop_per_s']:8.1f} GFLOP/s", end="")
    print(f"  floor {row['floor_fraction']:.2f}  " + "  ".join(f"{n} {r:.2f}x" for n, r in row["ratio"].items()))
    for name, reason in absent.items():
        print(f"{'':16} absent: {name}: {reason}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", help="B<batch>_L<length>_T<nodes>")
    parser.add_argument("--peers", nargs="+", help="names; default all")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=15.0, help="a shape's budget")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="where to write; default benchmarks/results/tree_attention_ISA.json")
    args = parser.parse_args()
    args.shapes = args.shapes or DEFAULT_SHAPES[args.device]
    device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    facts = machine_facts()
    bandwidth = read_bandwidth(device)
    rates = {name: matmul_rate(getattr(torch, name), device) for name in dict.fromkeys(["float32", args.dtype])}
    flop_rate = max(rates.values())
    facts |= {"read_gb_per_s": bandwidth / 1e9, "matmul_gflop_per_s": {k: v / 1e9 for k, v in rates.items()}}
    rates_text = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {name}" for name, rate in rates.items())
    name = f"{facts['processor']}, {args.threads} threads" if args.device == "cpu" else facts["cuda"]
    print(f"{name}, {bandwidth / 1e9:.1f} GB/s, {rates_text}")
    rows = [bench_shape(shape, args, bandwidth, flop_rate) for shape in args.shapes]
    arguments = {name: value for name, value in vars(args).items() if name != "json"}
    variant = facts["cpu_isa"] if args.device == "cpu" else "cuda"
    save(f"tree_attention_{variant}", rows, facts | {"arguments": arguments}, args.json)


if __name__ == "__main__":
    main()
