"""`python -m pagedtree info`: this installation's parts and the backends that run here."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import pagedtree
from pagedtree._engine import chosen_engine
from pagedtree.testing import backends
from pagedtree.tools import cubin
from pagedtree.tools.symbol_versions import symbol_versions

__all__ = ["collect", "main"]


def _libraries() -> dict[str, dict[str, Any]]:
    libraries: dict[str, dict[str, Any]] = {}
    for folder in map(Path, pagedtree.__path__):
        for path in sorted([*folder.glob("lib/*.so"), *folder.glob("_C*.so")]):
            libraries[str(path)] = {"bytes": path.stat().st_size, "needs": symbol_versions(path)}
    return libraries


def _cmake_dir() -> Path:
    for folder in map(Path, pagedtree.__path__):
        config = folder / "lib" / "cmake" / "pagedtree"
        if config.is_dir():
            return config
    raise FileNotFoundError("this installation has no CMake package")


def _native() -> dict[str, Any]:
    try:
        from pagedtree import _C
    except ImportError as error:  # the ops work without it
        return {"build": {"error": str(error)}, "cpu": {}, "engine": None}
    try:
        engine = "{} ({})".format(*chosen_engine())
    except RuntimeError as error:
        engine = f"error: {error}"
    try:
        active = _C.active_isa()
    except RuntimeError as error:
        active = f"error: {error}"
    return {"build": _C.build_info(), "cpu": {"isas": _C.available_isas(), "isa": active}, "engine": engine}


def _cuda_kernels() -> dict[str, Any]:
    library = cubin.cuda_library()
    if library is None:
        return {}
    try:
        kernels = cubin.read_kernels(library)
    except FileNotFoundError as error:
        return {"unknown": str(error)}
    texts: dict[str, dict[str, str]] = {}
    for kernel in kernels:
        text = f"{kernel.registers} registers, {kernel.stack_bytes} bytes of stack"
        texts.setdefault(kernel.architecture, {})[kernel.name] = text
    return texts


def collect() -> dict[str, Any]:
    native = _native()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "version": pagedtree.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "backends": backends(),
        "cpu": {**native["cpu"], "threads": torch.get_num_threads()},
        "cuda_device": device,
        "cuda_engine": native["engine"],
        "build": native["build"],
        "libraries": _libraries(),
        "cuda_kernels": _cuda_kernels(),
    }


def _lines(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list):
            yield f"{indent}{key}: {' '.join(map(str, value)) or 'none'}"
        else:
            yield f"{indent}{key}: {'none' if value is None else value}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pagedtree info", description="Shows this installation's parts and the backends that run here."
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument("--cmake-dir", action="store_true", help="write the folder for find_package(pagedtree) only")
    arguments = parser.parse_args(argv)
    if arguments.cmake_dir:
        print(_cmake_dir())
        return 0
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else "\n".join(_lines(facts)))
    return 0
