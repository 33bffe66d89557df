"""The check's output for people and for machines."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy
import torch

import pagedtree
from pagedtree.check.case import Place
from pagedtree.check.runner import FAILED, MEASURED, NOT_APPLICABLE, NOT_RUN, OK, Row
from pagedtree.testing import backends

__all__ = ["as_json", "group_line", "heading", "machine", "rerun_command", "rows_text", "summary"]

COLUMNS = (OK, FAILED, NOT_APPLICABLE, MEASURED)


def machine(place: Place) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "pagedtree": pagedtree.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),
        "backends": backends(),
        "device": str(place.device),
        "backend": place.backend,
    }
    try:
        from pagedtree import _C  # the ops do without it

        facts["cpu_isa"], facts["build"] = _C.active_isa(), _C.build_info()
    except (ImportError, RuntimeError) as error:
        facts["cpu_isa"] = f"unknown: {error}"
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        facts["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "bytes": properties.total_memory,
            "cuda_of_torch": torch.version.cuda,
            "driver": driver_version(),
        }
    return facts


def driver_version() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    process = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True, capture_output=True
    )
    return process.stdout.split("\n")[0].strip() or None


def options_of(place: Place) -> str:
    return f"--device {place.device}" + (f" --backend {place.backend}" if place.backend == "simt" else "")


def rerun_command(place: Place, name: str) -> str:
    return f'python -m pagedtree check {options_of(place)} --only "{name}"'


def heading(facts: dict[str, Any]) -> str:
    chip = facts["gpu"]["name"] if "gpu" in facts else f"{facts['backend']}, {facts['cpu_isa']}"
    lines = [f"pagedtree {facts['pagedtree']}, torch {facts['torch']}, {facts['device']} ({chip}), {facts['machine']}"]
    lines.append(f"{'group':18}" + "".join(f"{name:>16}" for name in COLUMNS) + f"{'seconds':>10}  compared with")
    return "\n".join(lines)


def group_line(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    against = sorted({row.against for row in rows if row.against})
    seconds = sum(row.seconds for row in rows)
    columns = "".join(f"{counts[name] or '-':>16}" for name in COLUMNS)
    return f"{rows[0].group:18}{columns}{seconds:10.1f}  {', '.join(against)}".rstrip()


def rows_text(place: Place, rows: Iterable[Row]) -> str:
    """Returns the rows that a person must see: measured, failed and not run."""
    lines = []
    for row in rows:
        if row.status == MEASURED:
            lines.append(f"  {row.name}: {row.detail}")
        elif row.status in (FAILED, NOT_RUN):
            lines += [f"{row.status.upper()} {row.name}", *(f"    {line}" for line in row.detail.splitlines())]
            lines.append(f"    rerun: {rerun_command(place, row.name)}")
    return "\n".join(lines)


def summary(rows: Sequence[Row], seconds: float) -> str:
    counts = Counter(row.status for row in rows)
    parts = [f"{counts[status]} {status}" for status in (*COLUMNS, NOT_RUN) if counts[status]]
    reasons = Counter(row.detail for row in rows if row.status == NOT_APPLICABLE)
    lines = [f"{len(rows)} rows in {seconds:.0f} s: {', '.join(parts) or 'nothing was run'}"]
    lines += [f"  not applicable: {count} {reason}" for reason, count in reasons.items()]
    if not counts[OK] and not counts[FAILED]:
        lines.append("  nothing was compared")
    return "\n".join(lines)


def as_json(place: Place, facts: dict[str, Any], rows: Sequence[Row], seconds: float, command: str) -> dict[str, Any]:
    counts = Counter(row.status for row in rows)
    return {
        "command": command,
        "machine": facts,
        "seconds": seconds,
        "counts": {status: counts[status] for status in (*COLUMNS, NOT_RUN)},
        "rows": [
            asdict(row) | ({"rerun": rerun_command(place, row.name)} if row.status in (FAILED, NOT_RUN) else {})
            for row in rows
        ],
    }
