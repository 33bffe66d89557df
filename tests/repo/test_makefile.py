"""The Makefile: which targets compile CUDA code, and what a build says before it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
# Runs with -n too, before the target's own recipe and with its variables.
SHOW = "include Makefile\nshow:\n\t+@env\n{target}: show\n"
OPTIONS = ("CUDA", "PAGEDTREE_CUDA", "PAGEDTREE_SIMT", "PAGEDTREE_EMULATED_ISA")


def options_of(tmp_path: Path, target: str, *given: str, **environment: str) -> dict[str, str]:
    """The variables of the build that a target would run with."""
    makefile = tmp_path / "Makefile"
    makefile.write_text(SHOW.format(target=target))
    inherited = {name: value for name, value in os.environ.items() if name not in (*OPTIONS, "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "-n", "-f", str(makefile), target, *given],
        cwd=ROOT,
        env={**inherited, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return {name: value for name, value in re.findall(r"^(\w+)=(.*)$", done.stdout, re.M) if name in OPTIONS[1:]}


@pytest.mark.parametrize("target", ["build", "demo", "test"])
def test_cuda_code_is_compiled_where_it_is_asked_for(tmp_path, target):
    emulated = {"PAGEDTREE_EMULATED_ISA": "1"} if target == "test" else {}
    without = {"PAGEDTREE_CUDA": "0", "PAGEDTREE_SIMT": "0", **emulated}
    with_cuda = {**emulated, **({"PAGEDTREE_SIMT": "1"} if target == "test" else {})}
    assert options_of(tmp_path, target, "CUDA=0") == without
    assert options_of(tmp_path, target, "CUDA=1") == options_of(tmp_path, target, CUDA="1") == with_cuda
    assert options_of(tmp_path, target) == (with_cuda if HAS_GPU else without)


def test_a_gpu_is_found_by_its_driver_too(tmp_path):
    """Some containers have no /dev/nvidia0."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text('#!/bin/sh\necho "GPU 0: NVIDIA of this test"\n')
    driver.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "PAGEDTREE_CUDA" not in options_of(tmp_path, "build", PATH=path)
    driver.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\n")
    assert ("PAGEDTREE_CUDA" in options_of(tmp_path, "build", PATH=path)) == (not HAS_GPU)


@pytest.mark.parametrize(
    ("target", "cuda", "simt"),
    [
        ("wheels", "1", "0"),
        ("build-all", "1", "0"),
        ("test-all", "1", "1"),
        ("test-simt", "0", "1"),
        ("test-host-cuda", "0", "1"),
        ("fuzz", "0", "1"),
        ("check-aarch64", "0", "0"),
    ],
)
def test_targets_for_cuda_code_need_no_option(tmp_path, target, cuda, simt):
    found = options_of(tmp_path, target, "CUDA=0")
    assert (found["PAGEDTREE_CUDA"], found["PAGEDTREE_SIMT"]) == (cuda, simt)


def test_other_values_are_refused():
    done = subprocess.run(["make", "help", "CUDA=/usr"], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode != 0 and "CUDA: expected 0 or 1, got /usr" in done.stderr


def announced(tmp_path, monkeypatch, capsys, jobs: int, *objects: str) -> str:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    plan = "\n".join(f"[{i}/9] Building {name}" for i, name in enumerate(objects))
    ninja = tmp_path / "ninja"
    ninja.write_text(f"#!/bin/sh\ncat << END\n{plan}\n[9/9] Linking\nEND\n")
    ninja.chmod(0o755)
    runpy.run_path(str(ROOT / "setup.py"))["announce"](str(ninja), tmp_path, jobs)
    return capsys.readouterr().out


def test_a_build_says_what_it_compiles(tmp_path, monkeypatch, capsys):
    def said(jobs: int, *objects: str) -> str:
        return announced(tmp_path, monkeypatch, capsys, jobs, *objects)

    avx2, avx512 = (f"CXX object CMakeFiles/pagedtree_cpu_{isa}.dir/attend.cpp.o" for isa in ("avx2", "avx512"))
    kernel = "CUDA object CMakeFiles/pagedtree_cuda.dir/csrc/cuda/trees.cu.o"
    simt = "CXX object CMakeFiles/pagedtree_simt.dir/simt/trees.cu.cpp.o"
    assert said(2, avx2, avx512) == said(2) == ""  # seconds
    assert (
        said(2, *[avx2, avx512] * 30) == "== compiling 60 files for 2 CPU instruction sets, 2 at once: about a minute\n"
    )
    assert said(1, *[kernel] * 5, *[simt] * 4) == (
        "== compiling 9 files with 9 of CUDA kernels among them, 1 at once: about 3 minutes\n"
    )
