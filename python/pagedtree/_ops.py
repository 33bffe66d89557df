"""Loads the op library and calls its ops; the only place that knows the library's name and namespace."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from pagedtree._arguments import expect_one_device, refusal
from pagedtree._gradients import new_library, register_gradients


def find_library(name: str) -> str | None:
    """Returns the path of lib/<name>. An editable install may spread the package over several folders."""
    paths = (os.path.join(folder, "lib", name) for folder in sys.modules["pagedtree"].__path__)
    return next((path for path in paths if os.path.exists(path)), None)


def _load() -> Any:
    path = find_library("libpagedtree_torch.so")
    if path is None:
        raise ImportError(
            "pagedtree's op library is missing: the package was not built (pip install --no-build-isolation -e .)"
        )
    torch.ops.load_library(path)
    return torch.ops.pagedtree, ctypes.CDLL(path)


ops, _library_calls = _load()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(ops, packet), overload or "default")


def _public_ops() -> list[str]:
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(name for namespace, name in names if namespace == "pagedtree" and not name.startswith("_"))


_library = new_library("gradients")
for _name in _public_ops():
    register_gradients(_library, _overload(_name))


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a shape function for an op's outputs, preceded by the op's device check; it gets arguments by name.

    One tensor without values (on "meta") sends the whole call there.
    """
    op, arguments = name.partition(".")[0], _overload(name)._schema.arguments
    required = [argument.name for argument in arguments if str(argument.type) == "Tensor"]
    written = [argument.name for argument in arguments if argument.is_write]

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fake)
        def checked(*args: Any, **kwargs: Any) -> Any:
            values = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
            for required_name in required:
                if values.get(required_name) is None:
                    raise refusal(required_name, "a Tensor", None, RuntimeError, op)
            expect_one_device(op, **values)
            for t in tree_leaves([values.get(written_name) for written_name in written]):
                if isinstance(t, Tensor) and isinstance(offset := t.storage_offset(), torch.SymInt):
                    # Inductor of torch 2.13 takes a dynamic offset of what an op writes for 0. It becomes static here,
                    # with the sizes that it is made of.
                    for number in (offset,) if offset.node.expr.is_symbol else (*t.shape, *t.stride(), offset):
                        int(number)
            return fake(**values)

        torch.library.register_fake(f"pagedtree::{name}", checked, lib=new_library(f"fake {name}"))
        return fake

    return register


class Prepared:
    """Handle of an op's prepared state; releases it on deletion."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, release: Callable[[ctypes.c_int64], Any] = _library_calls.pagedtree_release_prepared) -> None:
        if not sys.is_finalizing():
            release(ctypes.c_int64(self.number))


def makes_fakes() -> bool:
    """Returns whether new tensors are fake or part of a trace, hence useless to later calls."""
    return any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def has_no_values(tensor: Tensor) -> bool:
    """Returns whether this tensor or its results are fake or part of a trace, so nothing can be prepared."""
    return torch.compiler.is_compiling() or tensor.is_meta or makes_fakes()


# PyTorch's message for an argument that does not match the schema's type.
_TYPE_MISMATCH = re.compile(
    r"Expected a value of type '(.+?)' for argument '(.+?)' but instead found type '(.+?)'\..*?Value: (.*?)$",
    re.MULTILINE | re.DOTALL,
)


# Ops that are parts of another one, which their messages name.
_PARTS = {
    "_attend": "tree_attention", "_prepare_attention": "tree_attention",
    "_compact": "compact_kv", "_prepare_compaction": "compact_kv",
}  # fmt: skip


def _wrong_type(name: str, argument: str, expected: str, found: str, value: str) -> Exception:
    value = value if len(value) <= 80 else f"{value[:77]}..."
    return refusal(argument, f"type {expected}", f"{found}: {value}", TypeError, name)


def _first_that_is_no_tensor(name: str, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    arguments = getattr(op, "default", op)._schema.arguments
    values = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
    first = next(argument.name for argument in arguments if str(argument.type) == "Tensor")
    value = values.get(first)
    if value is None:
        return refusal(first, "a Tensor", None, TypeError, name)
    return _wrong_type(name, first, "Tensor", type(value).__name__, str(value))


# By the id of an op: the op, and its arguments that default to None.
_none_by_default: dict[int, tuple[Any, frozenset[str]]] = {}


def _with_names_none_by_default(op: Any) -> tuple[Any, frozenset[str]]:
    arguments = getattr(op, "default", op)._schema.arguments
    names = (a.name for a in arguments if a.kwarg_only and a.has_default_value() and a.default_value is None)
    return _none_by_default.setdefault(id(op), (op, frozenset(names)))


def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a raw op; its RuntimeError becomes the ValueError or TypeError that Python callers expect."""
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    if kwargs:  # PyTorch takes 0.4 us for each keyword argument, even None
        _, optional = _none_by_default.get(id(op)) or _with_names_none_by_default(op)
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in optional}
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        raise python_error(error, op, args, kwargs) from None


def python_error(error: RuntimeError, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    message = str(error)
    name = str(op).removeprefix("pagedtree.").split(".")[0]
    name = _PARTS.get(name, name)
    if mismatch := _TYPE_MISMATCH.search(message):
        expected, argument, found, value = mismatch.groups()
        return _wrong_type(name, argument, expected, found, value)
    if "Could not cast" in message:
        return TypeError(message)
    if "There were no tensor arguments" in message:
        return _first_that_is_no_tensor(name, op, args, kwargs)
    if '"aten::empty"' in message:  # by the stable interface, which drops Torch's message
        return torch.OutOfMemoryError(f"{name}: not enough memory for its results, whose sizes are arguments")
    start = message.find(f"{name}: ")
    if start < 0:
        return error
    message = message[start:].split("\nException raised from")[0]
    return (TypeError if message.endswith("expected a Tensor, got None") else ValueError)(message)


VerdictTensors = tuple[Tensor, Tensor, Tensor, Tensor]  # the fields of a `Verdict`


def empty_verdict(cu_nodes: Tensor, max_depth: int, **others: object) -> VerdictTensors:
    """Returns a verify op's outputs uninitialised."""
    batch = cu_nodes.shape[0] - 1
    nodes, count = cu_nodes.new_empty((batch, max_depth + 1)), cu_nodes.new_empty((batch,))
    return nodes, count, torch.empty_like(nodes, dtype=torch.int64), torch.empty_like(count)
