"""Every op beside its peers on one machine, in one run: tree attention, the cache, drafting, verification, sampling.

    python -m pagedtree bench [--quick] [--device cuda] [--ops NAME ...] [--axes NAME ...] [--peers NAME ...]
    python -m pagedtree bench --ops tree_attention --shapes batch=1,8 length=32768 tree="Medusa 64" --peers SDPA

Without arguments all points are measured: for each op its base, the headline points, and sweeps that vary one key of
the base at a time. What a peer gives is compared with the op's result before it is timed; a peer that is absent, and a
point that does not fit, are named with the reason. A row has the time of a call (median and interquartile range, cold
caches, candidates in turn), GB/s, GFLOP/s, the floor (the larger of bytes over measured read bandwidth and flops over
the measured rate of matmul) and the ratio to each peer, without and with what is planned once a step.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import attention_peers
import cache_peers
import draft_peers
import ratio_peers
import torch
import verify_peers
from measure import machine_facts, matmul_rate, read_bandwidth, save
from suite import Op, Point, Settings, points, run_all

OPS: list[Op] = [attention_peers.OP, *cache_peers.OPS, *draft_peers.OPS, *verify_peers.OPS, *ratio_peers.OPS]


def chosen_points(args: argparse.Namespace) -> list[Point]:
    """The points asked for; those that share their inputs stand together, as inputs may take longer than the timing."""
    ops = [op for op in OPS if op.name in args.ops]
    known = {key for op in ops for key in op.base}
    for text in args.shapes or []:
        if "=" not in text or text.split("=")[0] not in known:
            raise SystemExit(f"--shapes: expected KEY=VALUE,... with a key of {', '.join(sorted(known))}, got {text!r}")
    for axis in args.axes or []:
        if axis not in known:
            raise SystemExit(f"--axes: expected some of {', '.join(sorted(known))}, got {axis!r}")
    found = []
    for op in ops:
        if args.quick:
            found.append(Point(op, {**op.base, **op.quick}, True))
        else:
            found += points(op, args.axes, given_values(op, args.shapes) if args.shapes else None)
    inputs = [(point.op.inputs, tuple((k, v) for k, v in point.shape.items() if k != "law")) for point in found]
    first = {key: i for i, key in reversed([*enumerate(inputs)])}
    return [found[i] for i in sorted(range(len(found)), key=lambda i: first[inputs[i]])]


def given_values(op: Op, texts: list[str]) -> dict[str, list[Any]]:
    """`batch=1,8` as the op's own type of value. A comma followed by a blank is part of a value."""
    values: dict[str, list[Any]] = {}
    for key, text in (text.split("=", 1) for text in texts):
        if key in op.base:
            pieces = text.replace(", ", "\0").split(",")
            values[key] = [type(op.base[key])(piece.replace("\0", ", ")) for piece in pieces]
    return values


def line(row: dict[str, Any]) -> str:
    head = f"{row['op']:16} {row['point']:34}"
    if "skipped" in row:
        return f"{head} skipped: {row['skipped']}"
    notes = [f"{row['ms']:10.3f} ms +- {row['spread_ms']:.3f}, floor {row['floor_ms']:9.3f}"]
    notes += [f"{name} {ratio:.2f}x" for name, ratio in row["ratio"].items()]
    return "  ".join([head, *notes])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [op.name for op in OPS]
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ops", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--axes", nargs="*", metavar="KEY", help="sweep these keys only; none: no sweeps")
    parser.add_argument("--shapes", nargs="+", metavar="KEY=VALUE,...", help="all combinations, in place of the sweeps")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="those whose names contain one of these; none: none")
    parser.add_argument("--quick", action="store_true", help="one small point for each op, in less than three minutes")
    parser.add_argument("--list", action="store_true", help="tell the points and peers, measure nothing")
    parser.add_argument("--seconds", type=float, help="a point's budget (default 4; quick: 0.5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="default benchmarks/results/ops_ISA.json for all points, else build/bench.json")
    args = parser.parse_args()
    chosen = chosen_points(args)
    if args.list:
        for point in chosen:
            print(f"{point.op.name:16} {point.name}")
        for op in OPS:
            print(
                f"{op.name}: "
                + "; ".join(f"{p.name}{f' (absent: {r})' if (r := p.absent()) else ''}" for p in op.peers)
            )
        return 0

    device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    facts = machine_facts() | {"arguments": {key: value for key, value in vars(args).items() if key != "json"}}
    dtypes = [torch.bfloat16, torch.float32]
    rates = {str(dtype).removeprefix("torch."): matmul_rate(dtype, device) for dtype in dtypes}
    seconds = args.seconds or (0.5 if args.quick else 4.0)
    settings = Settings(
        device, seconds, read_bandwidth(device), max(rates.values()), args.peers, min_repeats=3 if args.quick else 5
    )
    facts |= {
        "read_gb_per_s": settings.bandwidth / 1e9,
        "matmul_gflop_per_s": {name: rate / 1e9 for name, rate in rates.items()},
    }
    rows = []
    for row in run_all(chosen, settings):
        print(line(row), flush=True)
        rows.append(row)
    facts["load_after"] = os.getloadavg()[0]
    for name, reason in {name: reason for row in rows for name, reason in row.get("absent", {}).items()}.items():
        print(f"absent: {name}: {reason}")
    wrong = [(row["op"], row["point"], name, text) for row in rows for name, text in row.get("wrong", {}).items()]
    for op, point, name, text in wrong:
        print(f"NOT EQUAL: {op}, {point}, {name}: {text}")
    is_full = not (args.quick or args.shapes or args.axes is not None or args.peers is not None or args.ops != names)
    variant = facts["cpu_isa"] if args.device == "cpu" else "cuda"
    save(f"ops_{variant}", rows, facts, args.json or (None if is_full else str(Path("build") / "bench.json")))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
