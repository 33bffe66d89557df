"""Results, and the form of performance.md's tables and their conditions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"

Row = dict[str, Any]
Result = dict[str, Any]
Show = Callable[[Row], str]


def load(name: str, results: Path = RESULTS) -> Result:
    """Loads a result; raises ValueError for a rehearsal."""
    result = json.loads((results / f"{name}.json").read_text())
    if result.get("benchmark") == "rehearsal":
        raise ValueError(f"{name}: a rehearsal measures nothing")
    return result


def listing(rows: Iterable[Row], columns: dict[str, Show]) -> str:
    lines = [[*columns], *([show(row) for show in columns.values()] for row in rows)]
    title, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([title, "|---" + "|--:" * (len(columns) - 1) + "|", *rest])


def pivot(corner: str, rows: Iterable[Row], line: Show, column: Show, cell: Show) -> str:
    """Keeps the rows' order in lines and columns; missing cells are empty."""
    found: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        cells, name = found.setdefault(line(row), {}), column(row)
        if name in cells:
            raise ValueError(f"pivot: one row for each line and column expected, got two for {line(row)}, {name}")
        cells[name] = cell(row)
        columns[name] = None
    shows = {name: lambda row, name=name: row[1].get(name, "") for name in columns}
    return listing(found.items(), {corner: lambda row: row[0], **shows})  # type: ignore[arg-type]


def field(key: str, form: str = "") -> Show:
    return lambda row: format(row[key], form)


def op_name(row: Row) -> str:
    return f"`{row['op']}`"


def machine_line(machine: dict[str, Any], name: str) -> str:
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    return (
        f"{machine['processor']}, {threads}, torch {machine['torch']}, {machine['date']}, commit {machine['commit']},"
        f" load {machine['load']:.1f} (`{name}.json`)."
    )


def others(row: Row) -> dict[str, float]:
    """Returns ratios of peers, without other modes of the op."""
    return {peer: ratio for peer, ratio in row["ratio"].items() if not peer.startswith("pagedtree")}


def fastest_other(row: Row) -> tuple[float, str]:
    """Returns the smallest ratio and its peer; 0 and "" without peers."""
    return min(((ratio, peer) for peer, ratio in others(row).items()), default=(0.0, ""))


def over_floor(row: Row) -> str:
    return f"{row['floor_ms'] / row['ms']:.2f}"
