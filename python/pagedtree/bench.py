"""`python -m pagedtree bench [NAME] [ARGUMENTS]`: runs the script bench_NAME.py of benchmarks/."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pagedtree

DEFAULT = "ops"


def scripts() -> dict[str, Path]:
    """Name -> script: of the wheel's copy (pagedtree/benchmarks) or of the checkout's benchmarks/."""
    for folder in map(Path, pagedtree.__path__):
        for place in (folder / "benchmarks", folder.parents[1] / "benchmarks"):
            found = sorted(place.glob("bench_*.py"))
            if found:
                return {path.stem.removeprefix("bench_"): path for path in found}
    return {}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of the script."""
    found = scripts()
    parser = argparse.ArgumentParser(
        prog="python -m pagedtree bench",
        usage="%(prog)s [-h] [NAME] [ARGUMENTS ...]",
        description=f"Measures on this machine; without a NAME all ops ({DEFAULT}).",
        epilog="python -m pagedtree bench NAME --help tells a benchmark's own arguments",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", choices=[*found], help=", ".join(found))
    has_name = bool(argv) and (not argv[0].startswith("-") or argv[0] in ("-h", "--help"))
    name = parser.parse_args(argv[:1]).name if has_name else DEFAULT
    return subprocess.run([sys.executable, str(found[name]), *argv[has_name:]]).returncode
