"""Tensors beyond 2^32 elements in sparse memory."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

NO_RESERVE = 0x4000  # MAP_NORESERVE


def sparse(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    elements = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    assert elements > 1 << 32
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, elements * torch.empty(0, dtype=dtype).element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)
