"""A process's memory, and tensors beyond 2^32 elements in sparse memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


NO_RESERVE = 0x4000  # MAP_NORESERVE


def sparse(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    elements = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    assert elements > 1 << 32
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, elements * torch.empty(0, dtype=dtype).element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)
