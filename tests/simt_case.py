from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pagedtree

GRID_AND_BLOCK = [ctypes.POINTER(ctypes.c_uint)] * 2
BYTES = ctypes.c_size_t
EXECUTOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *GRID_AND_BLOCK, BYTES, ctypes.c_void_p, BYTES)


@lru_cache
def symbols_of(library: Path) -> dict[int, str]:
    listing = subprocess.run(["nm", "--defined-only", library], text=True, capture_output=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {int(address, 16): name for address, kind, name in rows if kind in "TtWw"}


def base_of(library: Path) -> int:
    with open("/proc/self/maps") as maps:
        return min(int(line.partition("-")[0], 16) for line in maps if line.rstrip().endswith(str(library)))


def simt_library() -> Path | None:
    """Returns simt's library if it was built."""
    paths = (Path(folder) / "lib" / "libpagedtree_simt.so" for folder in pagedtree.__path__)
    return next((path for path in paths if path.exists()), None)


@contextmanager
def intercepted_launches(simt: Path, execute: Callable[..., int]) -> Iterator[None]:
    """Passes simt's launches to `execute`, which returns 0 to let it run one."""
    library, callback = ctypes.CDLL(str(simt)), EXECUTOR(execute)
    library.pagedtree_simt_set_executor(callback)
    try:
        yield
    finally:
        library.pagedtree_simt_set_executor(EXECUTOR())
