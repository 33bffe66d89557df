"""`benchmarks/gpu_run/run.sh` runs on a CPU, with simt as GPU."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pagedtree.check import command
from pagedtree.testing import backends
from pagedtree.tools import cli

ROOT = Path(__file__).resolve().parents[2]
# Replaces slow Python starts; logs each call as a line.
NOTED = """#!/bin/sh
printf '%s\\t' "$@" >> {calls}
echo >> {calls}
"""


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns a program's exit status; pytest runs anyway, so its test must only exist."""
    if arguments[:2] == ["-m", "pagedtree"]:
        return cli.main(arguments[2:])
    if arguments[:2] == ["-m", "pytest"]:
        return not (ROOT / arguments[-1]).exists()
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
    return int(end.value.code or 0)


@pytest.mark.skipif("simt" not in backends(), reason="built without simt")
def test_gpu_run_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(NOTED.format(calls=calls))
    python.chmod(0o755)
    environment = {**os.environ, "REHEARSE": "1", "PYTHON": str(python), "OMP_NUM_THREADS": "1"}
    for part in ("check", "step", "walk", "boxes", "trace", *"123"):
        subprocess.run([ROOT / "benchmarks/gpu_run/run.sh", part, out], env=environment, timeout=280, check=True)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    programs = [line.split("\t")[:-1] for line in calls.read_text().splitlines()]
    assert len(programs) == 12
    for rate in ("read_bandwidth", "matmul_rate"):
        monkeypatch.setattr(importlib.import_module("measure"), rate, lambda *_: 1e9)
    all_cases = command.all_cases
    monkeypatch.setattr(command, "all_cases", cache(lambda place: [*all_cases(place)]))  # once for three programs
    for arguments in programs:
        assert call(arguments, monkeypatch) == 0, arguments
    assert all(path.name.startswith("rehearsal_") for path in out.iterdir())
    results = {name: out / f"rehearsal_{name}.json" for name in ("calls", "headline", "sweep")}
    for path in results.values():
        result = json.loads(path.read_text())
        assert result["benchmark"] == "rehearsal"
        assert {target["met"] for row in result["rows"] for target in row["targets"]} <= {None}
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    with pytest.raises(ValueError, match="rehearsal_headline: a rehearsal measures nothing"):
        importlib.import_module("tables").load("rehearsal_headline", out)
    names = importlib.import_module("headline").BY_NAME
    rows = json.loads(results["headline"].read_text())["rows"]
    assert [row["point"] for row in rows] == list(names)
    assert all(row["ms"] > 0 and row["wrong"] == {} for row in rows)


def test_a_wrong_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token, another accepted path, or a host read is an error."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench, step = (importlib.import_module(name) for name in ("bench_step", "known_text"))
    run, draft, path = step.Step.run, step.Step.draft, tmp_path / "step.json"

    def planted(self) -> None:
        if self.batch > 1:
            self.drawn.fill_(0)
        run(self)
        self.history[0] += self.batch == 1

    monkeypatch.setattr(sys, "argv", ["bench_step", "--device", "cpu", "--tiny", "--json", str(path)])
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(step.Step, "run", planted)
    assert bench.main() == 1
    wrong = {row["wrong"].split("[")[0] for row in json.loads(path.read_text())["rows"] if "wrong" in row}
    assert wrong >= {"sequence 0: expected the tokens ", "sequence 0, step 0: expected the path "}
    monkeypatch.setattr(step.Step, "draft", lambda self: draft(self) + self.root.tolist()[0])
    with pytest.raises(RuntimeError, match="local_scalar_dense"):
        bench.main()
