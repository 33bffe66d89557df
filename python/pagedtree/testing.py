"""What tests and benchmarks share: the choice of backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from pagedtree._ops import ops

__all__ = ["backends", "use_backend"]


@cache
def _known() -> tuple[str, ...]:
    """Returns the backends of this build; the op calls them by their places here."""
    return tuple(ops._backends().split(","))


def backends() -> list[str]:
    """Returns the backends that this build can run here: "cpu", "simt" if it was built with it, "cuda" with a GPU."""
    return [name for name in _known() if name != "cuda" or torch.cuda.is_available()]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs ops on CPU tensors with backend `name` ("cpu" or "simt"); for the whole process, until the block ends.

    Raises ValueError for a backend that this build lacks.
    """
    if name not in backends():
        raise ValueError(f"use_backend: `name` must be one of {', '.join(backends())}, got {name}")
    if name == "cuda":  # chosen by the tensors' device
        yield
        return
    previous = ops._use_backend(_known().index(name))
    try:
        yield
    finally:
        ops._use_backend(previous)
