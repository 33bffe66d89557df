"""Measures ops and their peers: tree attention, the cache, drafting, verification, sampling.

    python -m pagedtree bench [--quick] [--device cuda] [--ops NAME ...] [--axes NAME ...] [--peers NAME ...]
    python -m pagedtree bench --ops tree_attention --shapes batch=1,8 length=32768 tree="Medusa 64" --peers SDPA

By default every op has its base point, headline points, and sweeps of one key of the base. Peers' results are compared
with the op's before timing; absent peers and points that do not fit are named. A row has the time of a call (median and
interquartile range, cold caches, candidates interleaved), GB/s, GFLOP/s, the floor (the larger of bytes over measured
read bandwidth and flops over the measured matmul rate) and the ratio to each peer, without and with planning once per
step; on a GPU also repeated calls and kernels.

On a GPU each op, or all `--together`, runs in a separate process, and the JSON is written after each row, so a crash or
hang loses one row.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attention_peers
import cache_peers
import draft_peers
import headline
import latent_peers
import measure
import ratio_peers
import read_trace
import recurrent_peers
import torch
import verify_peers
from measure import machine_facts, matmul_rate, read_bandwidth
from row_file import Results, run_apart
from suite import Op, Point, Settings, points, run_all

from pagedtree import _C
from pagedtree.testing import use_backend

FAMILIES = (attention_peers, latent_peers, recurrent_peers, cache_peers, draft_peers, verify_peers, ratio_peers)
OPS: list[Op] = [op for family in FAMILIES for op in family.OPS]


def chosen_points(args: argparse.Namespace) -> list[Point]:
    """Equal inputs, which may take longer than the timing, are adjacent."""
    ops = [op for op in OPS if op.name in args.ops]
    if args.headline:
        rows = headline.points(ops, small=args.quick)
        return [row for row in rows if not args.rows or any(text in row.name for text in args.rows)]
    known = {key for op in ops for key in op.base}
    axes = known - {"threads"} if args.axes is None and args.device == "cuda" else args.axes
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
            found += points(op, axes, given_values(op, args.shapes) if args.shapes else None)
    inputs = [(point.op.inputs, tuple((k, v) for k, v in point.shape.items() if k != "variant")) for point in found]
    first = {key: i for i, key in reversed([*enumerate(inputs)])}
    return [found[i] for i in sorted(range(len(found)), key=lambda i: first[inputs[i]])]


def given_values(op: Op, texts: list[str]) -> dict[str, list[Any]]:
    """Parses `batch=1,8` as the op's type; a comma before a blank belongs to the value."""
    values: dict[str, list[Any]] = {}
    for key, text in (text.split("=", 1) for text in texts):
        if key in op.base:
            pieces = text.replace(", ", "\0").split(",")
            values[key] = [type(op.base[key])(piece.replace("\0", ", ")) for piece in pieces]
    return values


VERDICTS = {True: "met", False: "MISSED", None: "not judged"}


def line(row: dict[str, Any]) -> str:
    head = f"{row['op']:16} {row['point']:34}"
    if "skipped" in row:
        return f"{head} skipped: {row['skipped']}"
    if "failed" in row:
        return f"{head} failed: {row['failed']}"
    notes = [f"{row['ms']:10.3f} ms +- {row['spread_ms']:.3f}, floor {row['floor_ms']:9.3f}"]
    if "warm_ms" in row:
        kernels = ", ".join(f"{name} {count} x {time:.1f}" for name, (count, time) in row["kernels"].items())
        notes.append(f"warm {row['warm_ms'] * 1e3:.1f} us; kernels, us: {kernels};")
    notes += [f"{name} {ratio:.2f}x" for name, ratio in row["ratio"].items()]
    for target in row.get("targets", ()):
        measured = "" if target["measured"] is None else f"{target['measured']:.3g} "
        notes.append(f"\n{'':18}{measured}{target['target']}: {VERDICTS[target['met']]}")
    return "  ".join([head, *notes])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [op.name for op in OPS]
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", choices=["cpu", "simt", "cuda"], help="simt: the GPU's kernels, on the device cpu")
    parser.add_argument("--ops", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--axes", nargs="*", metavar="KEY", help="sweep these keys only; none: no sweeps")
    parser.add_argument("--shapes", nargs="+", metavar="KEY=VALUE,...", help="all combinations, in place of the sweeps")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="those whose names contain one of these; none: none")
    parser.add_argument("--headline", action="store_true", help="the rows of headline.py, with their targets")
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="headline rows whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="one small point for each op, in less than three minutes")
    parser.add_argument("--call-only", action="store_true", help="call the op of each point once, for a profiler")
    parser.add_argument("--trace", action="store_true", help="with --call-only: a traced build's steps")
    parser.add_argument("--list", action="store_true", help="tell the points and peers, measure nothing")
    parser.add_argument("--seconds", type=float, help="a point's budget (default 4; quick: 0.5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="default benchmarks/results/ops_ISA.json for all points, else build/bench.json")
    parser.add_argument("--together", action="store_true", help="one process for all ops, and another where it dies")
    parser.add_argument(
        "--row-limit", type=float, default=120.0, help="seconds of a row in such a process (%(default)s)"
    )
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.backend = args.backend or args.device
    chosen = chosen_points(args)
    if args.list:
        for point in chosen:
            print(f"{point.op.name:16} {point.name}")
        for op in OPS:
            print(
                f"{op.name}: " + "; ".join(f"{p.name}{f' (absent: {r})' if (r := p.when()) else ''}" for p in op.peers)
            )
        return 0

    if args.into:
        return measure_into(args.into, chosen, args)
    torch.set_num_threads(args.threads)
    if args.call_only:
        return call_all(chosen, args)
    is_part = args.quick or args.headline or args.shapes or args.axes is not None or args.peers is not None
    is_full = not is_part and args.ops == names and args.backend == args.device
    variant = _C.active_isa() if args.device == "cpu" else "cuda"
    target = args.json or (measure.RESULTS / f"ops_{variant}.json" if is_full else Path("build") / "bench.json")
    # Small headline rows must not pass for measurements.
    benchmark = "rehearsal" if args.headline and args.quick else f"ops_{variant}"
    results = Results.start(Path(target), benchmark, facts_of(args))
    if args.device == "cuda" or args.together:
        run_apart(chosen, results, Path(__file__), sys.argv[1:], together=args.together)
    else:
        measure_all(chosen, results, args)
    results.finish(load_after=os.getloadavg()[0])
    return report(results.rows)


def call_all(chosen: Sequence[Point], args: argparse.Namespace) -> int:
    """On a GPU calls are between cudaProfilerStart and cudaProfilerStop."""
    device = torch.device(args.device)
    with use_backend(args.backend):
        for point in chosen:
            problem = point.op.problem(point.shape, device)
            ours = point.op.peers[0].make(problem)
            ours.run(0)
            if device.type == "cuda":
                torch.cuda.synchronize()
                if args.trace:
                    read_trace.take()
                torch.cuda.profiler.start()
            if ours.plan is not None:
                ours.plan()
            ours.run(0)
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
            print(f"called {point.op.name}: {point.name}", flush=True)
            if device.type == "cuda" and args.trace:
                read_trace.show(read_trace.take())
    return 0


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Collects facts of the machine, the arguments, and the rates of floors."""
    device, dtypes = torch.device(args.device), [torch.bfloat16, torch.float32]
    facts = machine_facts() | {"arguments": {key: value for key, value in vars(args).items() if key != "json"}}
    rates = {str(dtype).removeprefix("torch."): matmul_rate(dtype, device) / 1e9 for dtype in dtypes}
    facts |= {"read_gb_per_s": read_bandwidth(device) / 1e9, "matmul_gflop_per_s": rates}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the measuring processes
    return facts


def measure_into(path: Path, chosen: Sequence[Point], args: argparse.Namespace) -> int:
    """Measures one op's missing points, with `--first` one."""
    results = Results.read(path)
    torch.set_num_threads(args.threads)
    pending = results.lacking(chosen)
    measure_all(pending[:1] if args.first else pending, results, args)
    return 0


def measure_all(chosen: Sequence[Point], results: Results, args: argparse.Namespace) -> None:
    machine = results.machine
    settings = Settings(
        torch.device(args.device),
        args.seconds or (0.5 if args.quick else 4.0),
        machine["read_gb_per_s"] * 1e9,
        max(machine["matmul_gflop_per_s"].values()) * 1e9,
        args.peers,
        min_repeats=2 if args.headline and args.quick else 3 if args.quick else 5,
        without_compiled=args.headline or args.device == "cuda",
    )
    row_limit = args.row_limit if args.into else None
    with use_backend(args.backend):
        for point, row in zip(chosen, run_all(chosen, settings, row_limit), strict=True):
            if args.headline:
                row["targets"] = headline.judged(row, results.rows, machine, args.device, counts=not args.quick)
            results.add(point, row)
            print(line(row), flush=True)


def report(rows: list[dict[str, Any]]) -> int:
    """Returns the exit status."""
    for name, reason in {name: reason for row in rows for name, reason in row.get("absent", {}).items()}.items():
        print(f"absent: {name}: {reason}")
    wrong = [(row["op"], row["point"], name, text) for row in rows for name, text in row.get("wrong", {}).items()]
    for op, point, name, text in wrong:
        print(f"NOT EQUAL: {op}, {point}, {name}: {text}")
    failed = [row for row in rows if "failed" in row]
    for row in failed:
        print(f"FAILED: {row['op']}, {row['point']}: {row['failed']}")
    verdicts = [target["met"] for row in rows for target in row.get("targets", ())]
    if verdicts:
        print(", ".join(f"{verdicts.count(met)} {text}" for met, text in VERDICTS.items()))
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
