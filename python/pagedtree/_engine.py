"""The matrix instructions of attention on a GPU, and the reason for the choice.

`PAGEDTREE_ENGINE` is "mma.sync", "wgmma" or "auto", the default: wgmma, and verification over rows on chip, on a Hopper
GPU whose driver and build have passed `python -m pagedtree check --engine wgmma`. Ops read its verdict, a file in the
user's cache folder, at their first call on a device (csrc/cuda/engine.h).
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from pagedtree._ops import find_library
from pagedtree.testing import backends

__all__ = ["PASSED", "Facts", "chosen_engine", "facts", "library", "store_verdict", "verdict"]

PASSED = "passed"
HOW = "`python -m pagedtree check --engine wgmma`"


class _Facts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("error", "needs", "path", "beginning")),
        ("has_passed", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Facts:
    """A backend's facts about a device.

    Attributes:
        needs: missing requirements of the wgmma kernels, "" if they can run.
        path: the verdict's file, None without a cache folder.
        beginning: first part of a verdict for this GPU, driver and build.
        has_passed: whether the file holds a pass.
    """

    needs: str
    path: Path | None
    beginning: str
    has_passed: bool


@lru_cache
def library(backend: str) -> ctypes.CDLL:
    """Returns the library of "cuda" or "simt". Raises FileNotFoundError where this installation lacks it."""
    name = f"libpagedtree_{backend}.so"
    if (path := find_library(name)) is None:
        raise FileNotFoundError(f"{name} is not part of this installation")
    return ctypes.CDLL(path)


def facts(backend: str, device: torch.device) -> Facts:
    """Returns the facts of "cuda" or "simt" about a device. Raises RuntimeError for a driver error."""
    function = library(backend).pagedtree_engine_facts
    function.restype = ctypes.POINTER(_Facts)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        contents = function().contents
    if contents.error is not None:
        raise RuntimeError(contents.error.decode())
    path = Path(os.fsdecode(contents.path)) if contents.path else None
    return Facts(contents.needs.decode(), path, contents.beginning.decode(errors="replace"), bool(contents.has_passed))


def verdict(of: Facts) -> str | None:
    """Returns PASSED or "failed: " and the reason; None if the test has not run with this GPU, driver and build."""
    try:
        text = of.path.read_text() if of.path is not None else ""
    except (OSError, ValueError):
        return None
    line = text.removeprefix(of.beginning + "verdict: ")
    is_whole = line != text and line.count("\n") == 1 and line.endswith("\n")
    return line[:-1] if is_whole and (line[:-1] == PASSED or line.startswith("failed: ")) else None


def store_verdict(of: Facts, said: str) -> None:
    """Stores PASSED or "failed: " and the reason. Concurrent readers see either the old or the new verdict.

    Raises RuntimeError without a cache folder, and OSError where it cannot be written.
    """
    if of.path is None:
        raise RuntimeError("there is no cache folder: set PAGEDTREE_CACHE, XDG_CACHE_HOME or HOME")
    of.path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=of.path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{of.beginning}verdict: {' '.join(said.split())[:1000]}\n")
        os.chmod(name, 0o644)  # other users of the folder may read it
        os.replace(name, of.path)
    except OSError:
        os.unlink(name)
        raise


def chosen_engine() -> tuple[str, str]:
    """Returns the engine of calls on the current GPU, "mma.sync" or "wgmma", and the reason.

    Raises RuntimeError for a wrong PAGEDTREE_ENGINE.
    """
    from pagedtree import _C  # the ops do without it

    engine = _C.attention_engine()
    if engine != "auto":
        return engine, f"PAGEDTREE_ENGINE={engine}"
    if "cuda" not in backends():
        return "mma.sync", "auto, without a GPU"
    gpu_facts = facts("cuda", torch.device("cuda", torch.cuda.current_device()))
    if gpu_facts.needs:
        return "mma.sync", f"auto: wgmma needs {gpu_facts.needs}"
    outcome = verdict(gpu_facts)
    if outcome == PASSED:
        return "wgmma", "auto: its self-test has passed with this GPU, driver and build"
    if outcome is not None:
        return "mma.sync", f"auto: the self-test of wgmma {outcome}; {HOW} makes it again"
    return "mma.sync", f"auto: wgmma is not tested with this GPU, driver and build; {HOW} tests it"
