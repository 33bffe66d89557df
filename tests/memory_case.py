from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL("libc.so.6")


class MallocState(ctypes.Structure):
    """glibc's struct mallinfo2."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


LIBC.mallinfo2.restype = MallocState


def allocated() -> int:
    """Returns malloc's used bytes."""
    gc.collect(1)  # full collections take longer than the calls
    state = LIBC.mallinfo2()
    return int(state.uordblks + state.hblkhd)


def resident() -> int:
    """Returns resident bytes after a trim."""
    gc.collect()
    LIBC.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(call: Callable[[], Any], count: int, measure: Callable[[], int], warm_up: int = 100) -> float:
    """Returns bytes per call once `warm_up` calls have filled caches."""
    for _ in range(warm_up):
        call()
    before = measure()
    for _ in range(count):
        call()
    return (measure() - before) / count
