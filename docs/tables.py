"""What the tables of performance.md have in common: where the results lie, and how a table and its conditions look."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"

Row = dict[str, Any]
Result = dict[str, Any]
Show = Callable[[Row], str]


def load(name: str, results: Path = RESULTS) -> Result | None:
    """Loads what was kept under this name; None where that machine or model has not been measured."""
    file = results / f"{name}.json"
    if not file.exists():
        return None
    result = json.loads(file.read_text())
    if result.get("benchmark") == "rehearsal":
        raise ValueError(f"{name}: a rehearsal measures nothing")
    return result


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def listing(rows: Iterable[Row], columns: dict[str, Show]) -> str:
    """One line for each row, one column for each function of it."""
    return table(list(columns), [[show(row) for show in columns.values()] for row in rows])


def pivot(corner: str, rows: Iterable[Row], line: Show, column: Show, cell: Show) -> str:
    """Lines and columns in the order in which the rows have them; empty where no row is."""
    found: dict[tuple[str, str], str] = {}
    for row in rows:
        if (key := (line(row), column(row))) in found:
            raise ValueError(f"pivot: one row for each line and column expected, got two for {key}")
        found[key] = cell(row)
    lines, columns = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    return table([corner, *columns], [[name, *(found.get((name, of), "") for of in columns)] for name in lines])


def field(key: str, form: str = "") -> Show:
    return lambda row: format(row[key], form)


def threads_of(machine: dict[str, Any]) -> str:
    return f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"


def machine_line(machine: dict[str, Any], name: str) -> str:
    told = " whose CPU time is told" * bool(machine.get("arguments") and machine["arguments"].get("cpu_time"))
    return (
        f"{machine['processor']}, {threads_of(machine)}{told}, torch {machine['torch']}, {machine['date']},"
        f" commit {machine['commit']}, load average {machine['load']:.1f} at the start (`{name}.json`)."
    )


def is_ours(peer: str) -> bool:
    """The op itself in another mode stands beside the peers, too."""
    return peer.startswith("pagedtree")


def over_floor(row: Row) -> float:
    """The floor's time over the op's."""
    return row["floor_ms"] / row["ms"]
