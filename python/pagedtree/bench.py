"""`python -m pagedtree bench [NAME [ARGUMENTS]]`: runs the scripts bench_NAME.py of benchmarks/."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pagedtree


def scripts() -> dict[str, Path]:
    """Name -> script: of the wheel's copy (pagedtree/benchmarks) or of the checkout's benchmarks/."""
    for folder in map(Path, pagedtree.__path__):
        for place in (folder / "benchmarks", folder.parents[1] / "benchmarks"):
            found = sorted(place.glob("bench_*.py"))
            if found:
                return {path.stem.removeprefix("bench_"): path for path in found}
    return {}


def main(argv: Sequence[str]) -> int:
    """Returns the first non-zero exit status of the scripts."""
    found = scripts()
    parser = argparse.ArgumentParser(
        prog="python -m pagedtree bench",
        usage="%(prog)s [-h] [NAME [ARGUMENTS ...]]",
        description="Measures the ops on this machine.",
        epilog="python -m pagedtree bench NAME --help tells a benchmark's own arguments",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", choices=[*found], help=f"{', '.join(found)}; default: all")
    chosen = parser.parse_args(argv[:1]).name
    for name in [chosen] if chosen else found:
        print(f"== {name}", flush=True)
        status = subprocess.run([sys.executable, str(found[name]), *argv[1:]]).returncode
        if status:
            return status
    return 0
