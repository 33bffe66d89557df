"""Device tests: tensors come from the CPU; no op runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from pagedtree import DraftTree
from pagedtree._ops import ops
from pagedtree.testing import backends, use_backend

# Distributions: other backends draw more in the core suite; tests/ops/test_cases.py compares simt's bits with cpu's.
slow_on_simt = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.slow if name == "simt" else []) for name in backends()],
    indirect=True,
)


def to_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Moves tensors with strides, which `.to` drops, and shared memory."""
    memory: dict[int, Tensor] = {}
    moved = []
    for t in tensors:
        if t.device.type != device.type:
            storage = t.untyped_storage()
            if storage._cdata not in memory:
                memory[storage._cdata] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).to(device)
            t = memory[storage._cdata].view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())
        moved.append(t)
    return moved


def placed(t: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Moves a tensor to `device`, or the default one."""
    return to_device([t], torch.get_default_device() if device is None else torch.device(device))[0]


def made_on(device: torch.device) -> AbstractContextManager:
    """Makes `device` the default; if it is, without torch's mode, which slows every function."""
    return nullcontext() if torch.get_default_device().type == device.type else device


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default floating-point dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def only_on(backend: str) -> Iterator[None]:
    """Like `use_backend`; with "cuda" an op on CPU tensors raises, except in DraftTree, so no test silently skips the
    GPU."""
    if backend != "cuda":
        with use_backend(backend):
            yield
        return
    make = DraftTree.__init__

    def make_on_host(tree: DraftTree, parents: Sequence[int]) -> None:
        with use_backend("cpu"):
            make(tree, parents)

    previous = ops._use_backend(-1)  # none for CPU tensors
    DraftTree.__init__ = make_on_host
    try:
        yield
    finally:
        DraftTree.__init__ = make
        ops._use_backend(previous)
