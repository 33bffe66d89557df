"""The shape of the source tree: who may include whom, and where Torch and CUDA may be known."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cuh", ".cu"))

# Folder -> folders that it may include; the longest matching folder counts.
ARROWS = {
    "core": {"core"},
    "cpu": {"core", "cpu", "cpu/tile"},
    "cpu/tile": {"core", "cpu/tile"},
    "cuda": {"core", "cuda", "cuda/tile"},
    "cuda/tile": {"core", "cuda/tile", "simt"},  # each instruction for the GPU, and what it means for simt
    "simt": {"core", "simt"},
    "torch": {"core", "cpu", "cuda", "torch"},
    "bindings": {"core", "cpu", "cuda", "bindings"},
}


def folder_of(path: str) -> str:
    return max((name for name in ARROWS if path.startswith(name + "/")), key=len, default="")


def violations(path: str, text: str) -> list[str]:
    """What the file at `path` (relative to csrc) includes and may not."""
    folder, wrong = folder_of(path), []
    for name in re.findall(r'#\s*include\s+"([^"]+)"', text):
        if folder_of(name) not in ARROWS[folder]:
            wrong.append(name)
    for name in re.findall(r"#\s*include\s+<([^>]+)>", text):
        torch = name.startswith(("torch/", "c10/", "ATen/")) and folder != "torch"
        unstable = folder == "torch" and re.match(r"c10/|ATen/|torch/(?!csrc/stable/|headeronly/)", name)
        python = name.startswith(("pybind11/", "Python.h")) and folder != "bindings"
        cuda = name.startswith(("cuda", "mma")) and not folder.startswith(("cuda", "simt"))
        if torch or unstable or python or cuda:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(CSRC).as_posix())
def test_includes_follow_the_arrows(path: Path) -> None:
    relative = path.relative_to(CSRC).as_posix()
    assert folder_of(relative), f"{relative}: a folder without a rule in ARROWS"
    assert violations(relative, path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("core/a.h", '"cpu/isa.h"'),
        ("core/a.h", "<torch/csrc/stable/tensor.h>"),
        ("core/a.h", "<cuda_runtime.h>"),
        ("cpu/a.cpp", '"torch/check.h"'),
        ("cpu/a.cpp", '"isa.h"'),
        ("cpu/tile/a.h", '"cpu/kernels.h"'),
        ("cuda/a.cu", '"cpu/parallel.h"'),
        ("cuda/a.cu", '"simt/machine.h"'),
        ("cuda/tile/a.cuh", '"cuda/kernels.h"'),
        ("simt/a.h", '"cuda/kernels.h"'),
        ("torch/a.cpp", "<ATen/ATen.h>"),
        ("torch/a.cpp", "<torch/extension.h>"),
        ("torch/a.cpp", "<pybind11/pybind11.h>"),
    ],
)
def test_a_wrong_include_is_found(path: str, include: str) -> None:
    assert violations(path, f"#include {include}\n") == [include.strip('"<>')]
