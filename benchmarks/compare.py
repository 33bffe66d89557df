"""What became slower between two results of bench_ops.py; exit status 1 where anything did.

    python benchmarks/compare.py old.json new.json [--tolerance 0.05]

A point is slower where its median grew by more than both spreads (interquartile ranges) together and by more than the
tolerance. Peers are the same code in both runs: how much their times changed is printed, as a hint at the machine's own
state. Exit status 2 where the results cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Key = tuple[str, str]
SAME = ("processor", "cuda", "threads", "cpu_isa")
OURS = "pagedtree"


def timings_of(result: dict[str, Any]) -> dict[Key, dict[str, dict[str, float]]]:
    """(op, shape) -> name -> timing."""
    rows = [row for row in result["rows"] if "timings" in row]
    return {(row["op"], json.dumps(row["shape"], sort_keys=True)): row["timings"] for row in rows}


def is_slower(old: dict[str, float], new: dict[str, float], tolerance: float) -> bool:
    grown = new["median"] - old["median"]
    return grown > max(old["spread"] + new["spread"], tolerance * old["median"])


def slower(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> Iterator[tuple[Key, float, float]]:
    """Points of both, with the seconds of old and new."""
    before, after = timings_of(old), timings_of(new)
    for key in before.keys() & after.keys():
        if is_slower(before[key][OURS], after[key][OURS], tolerance):
            yield key, before[key][OURS]["median"], after[key][OURS]["median"]


def drift(old: dict[str, Any], new: dict[str, Any]) -> float | None:
    """New over old time of the peers, the median over all points."""
    before, after = timings_of(old), timings_of(new)
    ratios = [
        after[key][name]["median"] / timing["median"]
        for key in before.keys() & after.keys()
        for name, timing in before[key].items()
        if not name.startswith(OURS) and name in after[key]
    ]
    return statistics.median(ratios) if ratios else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.05, help="default %(default)s")
    args = parser.parse_args(argv)
    old, new = (json.loads(path.read_text()) for path in (args.old, args.new))
    machines = {name: [result["machine"].get(name) for result in (old, new)] for name in SAME}
    if different := [f"{name} {before} and {after}" for name, (before, after) in machines.items() if before != after]:
        print(f"not the same machine: {'; '.join(different)}", file=sys.stderr)
        return 2
    common = timings_of(old).keys() & timings_of(new).keys()
    if not common:
        print("the results have no point in common", file=sys.stderr)
        return 2
    gone = len(timings_of(old)) - len(common)
    print(f"{len(common)} points in both" + (f", {gone} of the old ones are gone" if gone else ""))
    change = drift(old, new)
    if change is not None:
        print(f"peers take {change:.2f} x the time they took")
    found = sorted(slower(old, new, args.tolerance), key=lambda entry: entry[1] / entry[2])
    for (op, shape), before, after in found:
        print(f"SLOWER {after / before:.2f} x: {op} {shape}: {before * 1e3:.3f} ms, now {after * 1e3:.3f} ms")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
