"""`python -m pagedtree bench [NAME] [ARGUMENTS]`: runs the script bench_NAME.py of benchmarks/."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pagedtree

DEFAULT = "ops"
# Runs a model and text of examples/, which are not in the wheel.
OF_CHECKOUT = ("real",)


def scripts() -> dict[str, Path]:
    """Returns name -> script, from the wheel's copy or the checkout."""
    for folder in map(Path, pagedtree.__path__):
        for place in (folder, folder.parents[1]):
            if paths := sorted((place / "benchmarks").glob("bench_*.py")):
                return {path.stem.removeprefix("bench_"): path for path in paths}
    return {}


def missing(script: Path) -> Path | None:
    """Returns the missing folder that the script needs."""
    checkpoints = script.resolve().parents[1] / "examples" / "checkpoints"
    needed = script.stem.removeprefix("bench_") in OF_CHECKOUT
    return checkpoints if needed and not any(checkpoints.glob("*/*.safetensors")) else None


def main(argv: Sequence[str]) -> int:
    """Returns the script's exit status, or 2 if this installation lacks something that the script needs."""
    paths = scripts()
    parser = argparse.ArgumentParser(
        prog="python -m pagedtree bench",
        usage="%(prog)s [-h] [NAME] [ARGUMENTS ...]",
        description=f"Measures on this machine; without a NAME all ops ({DEFAULT}).",
        epilog="python -m pagedtree bench NAME --help tells a benchmark's own arguments. "
        f"In a checkout of the repository only: {', '.join(OF_CHECKOUT)}.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", choices=[*paths], help=", ".join(paths))
    has_name = bool(argv) and (not argv[0].startswith("-") or argv[0] in ("-h", "--help"))
    name = parser.parse_args(argv[:1]).name if has_name else DEFAULT
    if (folder := missing(paths[name])) is not None:
        print(
            f"{parser.prog} {name} needs the models of examples/, and {folder} is not there: neither the wheel nor "
            f"the source archive holds them. Get a checkout of pagedtree's repository and run in it: "
            f"python benchmarks/{paths[name].name}",
            file=sys.stderr,
        )
        return 2
    return subprocess.run([sys.executable, str(paths[name]), *argv[has_name:]]).returncode
