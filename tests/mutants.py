"""Repeats mistakes once made in the sources; tests must find each.

    python tests/mutants.py [NAME ...]

Run by `make test-mutations` after a build. Each mutant changes one place in a copy of csrc or python, builds it
(verification for the CPU, portable only; two attention kernels for simt), and runs its tests until one fails. A
surviving mutant or missing place is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from support.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutants"


def build(backend: str) -> None:
    """Builds the backend's library from BUILD / csrc into the package's copy."""
    if backend == "python":
        return
    tree, library = BUILD / backend, f"pagedtree_{backend}"
    if not tree.exists():
        options = ["-DPAGEDTREE_PYTHON=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
        if backend == "simt":
            options += ["-DPAGEDTREE_SIMT=ON"]
        else:  # another processor, without x86 instruction sets: one object per file
            options += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=portable"]
        run("cmake", "-S", str(BUILD), "-B", str(tree), "-G", "Ninja", *options, PAGEDTREE_CUDA="0")
    run("cmake", "--build", str(tree), "--target", library, "--parallel", str(os.cpu_count()))
    shutil.copy(tree / f"lib{library}.so", BUILD / "python" / "pagedtree" / "lib")


def run(*command: str, **environment: str) -> None:
    environment = {**os.environ, **environment}
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout}")


def failed_test(tests: tuple[str, ...], only: str) -> str | None:
    """Returns the first failing test or the signal of a crash, None if all pass; other ends raise."""
    environment = {**os.environ, "PYTHONPATH": str(BUILD / "python"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-k", only, "-m", "not slow and not stats"]
    done = subprocess.run([*command, *tests], cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode <= 0 and done.returncode != -9:  # 9: out of memory, which shows nothing
        return f"a crash by signal {-done.returncode}" if done.returncode else None
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode != 1 or not failures:
        sys.exit(done.stdout + done.stderr)
    return failures[0].removeprefix("FAILED ").split(" - ")[0]


def main() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    for name in ("csrc", "cmake", "python", "tests/simt"):
        shutil.copytree(ROOT / name, BUILD / name)
    shutil.copy(ROOT / "CMakeLists.txt", BUILD)
    mutants = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    for backend in sorted({mutant.backend for mutant in mutants}):
        build(backend)
        for only in sorted({mutant.only for mutant in mutants if mutant.backend == backend}):
            tests = {test for mutant in mutants if mutant.only == only for test in mutant.tests}
            unbroken = failed_test(tuple(sorted(tests)), only)
            if unbroken is not None:
                sys.exit(f"fails unbroken: {unbroken}")
    survivors = []
    for i, mutant in enumerate(mutants):
        if i and mutant.backend != mutants[i - 1].backend:
            build(mutants[i - 1].backend)  # restored
        start = time.monotonic()
        source = BUILD / ("python/pagedtree" if mutant.backend == "python" else "csrc") / mutant.file
        text = source.read_text()
        if mutant.line not in text:
            sys.exit(f"{mutant.name}: {mutant.file} has no line `{mutant.line}` any more")
        source.write_text(text.replace(mutant.line, mutant.broken))
        build(mutant.backend)
        killer = failed_test(mutant.tests, mutant.only)
        source.write_text(text)
        print(f"{time.monotonic() - start:5.0f} s  {mutant.name}: {killer or 'SURVIVES'}", flush=True)
        survivors += [mutant.name] * (killer is None)
    if survivors:
        sys.exit(f"{len(survivors)} of {len(mutants)} mutants survive: {', '.join(survivors)}")
    print(f"{len(mutants)} of {len(mutants)} mutants found")


if __name__ == "__main__":
    main()
