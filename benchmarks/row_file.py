"""The JSON file of a benchmark's rows, and the processes that fill it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import write_json
from suite import Point


@dataclass
class Results:
    """Rows are written as soon as they are added, so a kill loses none."""

    path: Path
    benchmark: str
    machine: dict[str, Any]
    rows: list[dict[str, Any]]

    @classmethod
    def start(cls, path: Path, benchmark: str, machine: dict[str, Any]) -> Results:
        results = cls(path, benchmark, machine, [])
        results.write()
        return results

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls(path, **json.loads(path.read_text()))

    def write(self) -> None:
        write_json(self.path, {"benchmark": self.benchmark, "machine": self.machine, "rows": self.rows})

    def add(self, point: Point, row: dict[str, Any]) -> None:
        self.rows.append({"op": point.op.name, "point": point.name} | row)
        self.write()

    def finish(self, **facts: Any) -> None:
        self.machine |= facts
        self.write()
        print(f"wrote {self.path}", file=sys.stderr)

    def lacking(self, chosen: Sequence[Point]) -> list[Point]:
        done = {(row["op"], row["point"]) for row in self.rows}
        return [point for point in chosen if (point.op.name, point.name) not in done]


def run_apart(
    chosen: Sequence[Point], results: Results, script: Path, arguments: list[str], *, together: bool = False
) -> None:
    """Measures each op's points, or all `together`, in a separate process: `script` with `--into FILE`.

    So an op's allocator, graphs and device state cannot affect the next. A process that dies loses its current row,
    which is tried again without peers and then marked as failed; another process continues.
    """
    command = [sys.executable, str(script), *arguments, "--into", str(results.path)]
    ops = list(dict.fromkeys(point.op.name for point in chosen))
    for group in [ops] if together else [[op] for op in ops]:
        mine = [point for point in chosen if point.op.name in group]
        while results.lacking(mine):
            status = subprocess.run([*command, "--ops", *group], check=False).returncode
            results.rows = Results.read(results.path).rows
            if status == 0 or not (left := results.lacking(mine)):
                break
            alone = subprocess.run([*command, "--ops", *group, "--peers", "--first"], check=False).returncode
            results.rows = Results.read(results.path).rows
            reason = f"its process ended with status {status}"
            if alone == 0 and results.lacking(mine) != left:
                results.rows[-1]["failed_beside_peers"] = reason
                results.write()
            else:
                results.add(left[0], {"shape": left[0].shape, "headline": left[0].is_headline, "failed": reason})
                print(f"{left[0].op.name} {left[0].name}: {reason}", flush=True)
