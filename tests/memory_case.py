"""How much memory the process keeps."""

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
    """The bytes that the process has from malloc and has not given back."""
    gc.collect(1)  # what the last calls left; to look through everything takes longer than the calls
    state = LIBC.mallinfo2()
    return int(state.uordblks + state.hblkhd)


def resident() -> int:
    """The bytes of the process that are in memory, without those that malloc keeps for later."""
    gc.collect()
    LIBC.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(call: Callable[[], Any], count: int, measure: Callable[[], int], warm_up: int = 100) -> float:
    """Bytes for each of `count` calls, after others that fill the caches."""
    for _ in range(warm_up):
        call()
    before = measure()
    for _ in range(count):
        call()
    return (measure() - before) / count
