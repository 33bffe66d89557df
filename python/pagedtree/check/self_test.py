"""`python -m pagedtree check --engine wgmma`: may Hopper's kernels run on this GPU?

The kernels run in a separate process with a time limit, because a missed mbarrier phase never ends. First each
instruction by itself, then attention in every tile, and walks over rows on chip. The verdict is kept for
`PAGEDTREE_ENGINE=auto`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from pagedtree._engine import PASSED, Facts, store_verdict
from pagedtree.check.case import Case, Place
from pagedtree.check.cases import attention, instructions_sm90, verification
from pagedtree.check.runner import OK, run_row

__all__ = ["rows", "run", "run_child", "run_rows"]

# A process that was killed may stay for as long as the driver needs to end its kernel, or for ever.
PATIENCE = 10.0


def rows() -> Iterator[Case]:
    yield from instructions_sm90.cases()
    yield from attention.wgmma_cases()
    yield from verification.chip_cases()


def run_rows(cases: list[Case], device: str, backend: str, written: str) -> None:
    """Runs the rows up to the first failure. The file gets each name before its row runs, and finally PASSED."""
    place = Place(torch.device(device), backend)
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    with open(written, "w") as file:
        for case in cases:
            print(case.name, file=file, flush=True)
            row = run_row(case, place)
            if row.status != OK:
                print(f"{row.status}: {row.detail}", file=file, flush=True)
                sys.exit(1)
        print(PASSED, file=file, flush=True)


CHILD = "import sys; from pagedtree.check import self_test; self_test.run_rows([*self_test.rows()], *sys.argv[1:])"


def run_child(place: Place, seconds: float, code: str = CHILD, expected: int | None = None) -> str:
    """Runs the rows in a separate process; returns PASSED, or "failed: " and why.

    Args:
        code: the Python that calls run_rows() with device, backend and the file's name.
        expected: how many rows must have run, default all.
    """
    expected = sum(1 for _ in rows()) if expected is None else expected
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.txt"
        command = [sys.executable, "-c", code, str(place.device), place.backend, str(path)]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE)
            status = None
        lines = path.read_text().splitlines() if path.exists() else []
    if status == 0 and len(lines) == expected + 1 and lines[-1] == PASSED:
        return PASSED
    row = lines[-1] if lines else "no row"
    if status is None:
        return f"failed: no end within {seconds:g} s, in {row}"
    if status < 0:
        return f"failed: ended by signal {-status}, in {row}"
    if status == 1 and len(lines) > 1:
        return f"failed: {lines[-2]}: {row}"
    return f"failed: ended with status {status} after {len(lines)} of {expected} rows"


def run(place: Place, found: Facts, seconds: float) -> int:
    """Runs the test, prints and stores the verdict. Returns the exit status of the command."""
    count, begin = sum(1 for _ in rows()), time.perf_counter()
    print(f"self-test of wgmma: {count} rows on {place.device}, at most {seconds:g} s", flush=True)
    outcome = run_child(place, seconds)
    print(f"wgmma {outcome} ({time.perf_counter() - begin:.0f} s)")
    try:
        store_verdict(found, outcome)
    except (OSError, RuntimeError) as error:
        print(f"The verdict cannot be kept, so that attention does not know of it: {error}")
        return 1
    print(f"kept in {found.path}")
    if outcome == PASSED:
        print("From now on attention uses it with this GPU, driver and build, unless PAGEDTREE_ENGINE says otherwise.")
    else:
        print("Attention uses mma.sync here, unless PAGEDTREE_ENGINE says otherwise.")
    return int(outcome != PASSED)
