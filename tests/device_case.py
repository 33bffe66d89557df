"""What tests that run on a device share: tensors get there from the CPU, and no op runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from pagedtree import DraftTree
from pagedtree._ops import ops
from pagedtree.testing import backends, use_backend

# For distributions: the core suite looks at those of the other backends, with more draws, and compares simt with cpu
# bit for bit (tests/ops/test_cases.py).
slow_on_simt = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.slow if name == "simt" else []) for name in backends()],
    indirect=True,
)


def to_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device` with their strides, which `.to` does not keep; views of one memory stay so."""
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
    """One tensor on `device`, or on the default one."""
    return to_device([t], torch.get_default_device() if device is None else torch.device(device))[0]


def made_on(device: torch.device) -> AbstractContextManager:
    """Tensors are made on `device` unless told otherwise. Where that is so already, without torch's mode for it, which
    every function of torch would pass through."""
    return nullcontext() if torch.get_default_device().type == device.type else device


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block torch makes floating-point tensors of `dtype` unless told otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def only_on(backend: str) -> Iterator[None]:
    """`use_backend`; with "cuda" an op on CPU tensors also raises RuntimeError, so that no test skips the GPU unseen.

    Making a DraftTree is allowed: it lives on the host, whatever the device of the rest.
    """
    if backend != "cuda":
        with use_backend(backend):
            yield
        return
    make = DraftTree.__init__

    def make_on_host(tree: DraftTree, parents: Sequence[int]) -> None:
        with use_backend("cpu"):
            make(tree, parents)

    previous = ops._use_backend(-1)  # none for tensors on the CPU
    DraftTree.__init__ = make_on_host
    try:
        yield
    finally:
        DraftTree.__init__ = make
        ops._use_backend(previous)
