"""What the tables of performance.md have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine_line(machine: dict[str, Any], name: str) -> str:
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    if "cpu_time" in machine.get("arguments", ()) and machine["arguments"]["cpu_time"]:
        threads += " whose CPU time is told"
    return (
        f"{machine['processor']}, {threads}, torch {machine['torch']}, {machine['date']},"
        f" commit {machine['commit']}, load average {machine['load']:.1f} at the start"
        f" (`benchmarks/results/{name}.json`)."
    )
