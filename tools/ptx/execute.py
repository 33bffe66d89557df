"""Runs ops on the backend simt with chosen kernels executed from the PTX that nvcc made of them."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ptx.interpreter import Block
from ptx.module import Entry, Fault, Module
from ptx.state import Memory

import pagedtree
from pagedtree.testing import use_backend
from pagedtree.tools.cubin import find_cuobjdump

EXECUTOR = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
)


@lru_cache
def module_of(library: Path) -> Module:
    """The PTX in the library."""
    program = find_cuobjdump()
    assert program is not None
    return Module(subprocess.run([program, "-ptx", library], text=True, capture_output=True, check=True).stdout)


@lru_cache
def entry_of(library: Path, name: str) -> Entry:
    return module_of(library).entry(name)


@lru_cache
def symbols_of(library: Path) -> dict[int, str]:
    listing = subprocess.run(["nm", "--defined-only", library], text=True, capture_output=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {int(address, 16): name for address, kind, name in rows if kind in "TtWw"}


def base_of(library: Path) -> int:
    with open("/proc/self/maps") as maps:
        return min(int(line.partition("-")[0], 16) for line in maps if line.rstrip().endswith(str(library)))


def simt_library() -> Path | None:
    """The library of the backend simt, where this build has it."""
    paths = (Path(folder) / "lib" / "libpagedtree_simt.so" for folder in pagedtree.__path__)
    return next((path for path in paths if path.exists()), None)


@contextmanager
def intercepted_launches(simt: Path, execute: Callable[..., int]) -> Iterator[None]:
    """Within it, simt hands launches to `execute`, which returns 0 for those that it leaves to the machine."""
    library, callback = ctypes.CDLL(str(simt)), EXECUTOR(execute)
    library.pagedtree_simt_set_executor(callback)
    try:
        yield
    finally:
        library.pagedtree_simt_set_executor(EXECUTOR())


@contextmanager
def executed_from_ptx(simt: Path, cuda: Path, wanted: Callable[[str], bool]) -> Iterator[list[str]]:
    """Within it, ops run on simt and kernels whose mangled name is `wanted` from the PTX; yields the names that were.

    A fault is raised when the block ends.
    """
    executed: list[str] = []
    faults: list[Exception] = []

    def execute(kernel, grid, block, shared_bytes, params, param_bytes) -> int:
        name = symbols_of(simt).get(kernel - base, "")
        if faults or not wanted(name):
            return 0
        try:
            entry, memory = entry_of(cuda, name), Memory()
            bytes_of_params = ctypes.string_at(params, param_bytes)
            if param_bytes != entry.param_bytes:
                raise Fault(f"{param_bytes} bytes of parameters; the PTX has {entry.param_bytes}")
            sizes = grid[0], grid[1], grid[2]
            for i in range(sizes[0] * sizes[1] * sizes[2]):
                index = i % sizes[0], i // sizes[0] % sizes[1], i // (sizes[0] * sizes[1])
                Block(entry, bytes_of_params, memory, index, tuple(block[:3]), sizes, shared_bytes).run()
            executed.append(name)
        except Exception as error:  # not through C++
            faults.append(error)
        return 1

    with use_backend("simt"), intercepted_launches(simt, execute):
        base = base_of(simt)
        yield executed
    if faults:
        raise faults[0]
