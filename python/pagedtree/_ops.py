"""Loads the op library and calls its ops; the only place that knows the library's name and namespace."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import pagedtree


def _load() -> Any:
    # An editable install may spread the package over several folders.
    for folder in pagedtree.__path__:
        path = os.path.join(folder, "lib", "libpagedtree_torch.so")
        if os.path.exists(path):
            torch.ops.load_library(path)
            return torch.ops.pagedtree
    raise ImportError(
        "pagedtree's op library is missing: the package was not built (pip install --no-build-isolation -e .)"
    )


ops = _load()


def makes_fakes() -> bool:
    """Whether tensors that are made now are fake or part of a trace, and so of no use to later calls."""
    return any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def expect_type(name: str, value: object, expected: type) -> None:
    """Raises TypeError: for arguments that Python reads before an op does."""
    if not isinstance(value, expected):
        raise TypeError(f"{name}: expected a {expected.__name__}, got {type(value).__name__}")


def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a raw op; its refusal (RuntimeError) becomes the ValueError or TypeError that Python callers expect."""
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        message = str(error)
        name = str(op).removeprefix("pagedtree.").split(".")[0]
        if "Expected a value of type" in message or "Could not cast" in message:
            raise TypeError(message) from None
        if "There were no tensor arguments" in message:
            raise TypeError(f"{name}: expected tensors, got none") from None
        start = message.find(f"{name}: ")
        if start < 0:
            raise
        message = message[start:].split("\nException raised from")[0]
        raise (TypeError if message.endswith("must be a Tensor, got None") else ValueError)(message) from None
