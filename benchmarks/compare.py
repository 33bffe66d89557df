"""Lists points that became slower between two results of bench_ops.py.

    python benchmarks/compare.py old.json new.json [--tolerance 0.05]

A point is slower if its median grew by more than both spreads (interquartile ranges) together and by more than the
tolerance. Peers are the same code in both runs: their changes show the machine's state. Exit status: 1 if any point is
slower, 2 if the results cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

Key = tuple[str, str]
SAME = ("processor", "cuda", "threads", "cpu_isa")
OURS = "pagedtree"


def timings_of(result: dict[str, Any]) -> dict[Key, dict[str, dict[str, float]]]:
    rows = [row for row in result["rows"] if "timings" in row]
    return {(row["op"], json.dumps(row["shape"], sort_keys=True)): row["timings"] for row in rows}


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
    before, after = timings_of(old), timings_of(new)
    common = sorted(before.keys() & after.keys())
    if not common:
        print("the results have no point in common", file=sys.stderr)
        return 2
    gone = len(before) - len(common)
    print(f"{len(common)} points in both" + (f", {gone} of the old ones are gone" if gone else ""))
    peers = [
        after[key][name]["median"] / timing["median"]
        for key in common
        for name, timing in before[key].items()
        if not name.startswith(OURS) and name in after[key]
    ]
    if peers:
        print(f"peers take {statistics.median(peers):.2f} x the time they took")
    pairs = [(key, before[key][OURS], after[key][OURS]) for key in common]
    slower = [
        (now["median"] / was["median"], f"{op} {shape}: {was['median'] * 1e3:.3f} ms, now {now['median'] * 1e3:.3f} ms")
        for (op, shape), was, now in pairs
        if now["median"] - was["median"] > max(was["spread"] + now["spread"], args.tolerance * was["median"])
    ]
    for ratio, text in sorted(slower, reverse=True):
        print(f"SLOWER {ratio:.2f} x: {text}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
