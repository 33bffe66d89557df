"""Checks of arguments that Python reads before an op does: types and devices."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

__all__ = ["argument_error", "checked", "refusal"]
__all__ += ["expect_dims", "expect_integers", "expect_one_device", "expect_shape", "expect_type"]

Function = TypeVar("Function", bound=Callable[..., Any])
_NUMBERS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((Integral, torch.SymInt), "an integer"),
    float: ((Real, torch.SymInt, torch.SymFloat), "a number"),
    bool: ((Integral,), "True or False"),
    type(None): ((type(None),), "None"),
}


def refusal(
    name: object, expected: object, got: object = ..., kind: type[Exception] = ValueError, function: str | None = None
) -> Exception:
    """Returns the error "FUNCTION: ARGUMENT: expected A, got B", whose function is `argument_error`'s."""
    text = f"expected {expected}" if got is ... else f"expected {expected}, got {got}"
    return argument_error(name, text, kind, function)


def argument_error(
    name: object, text: object, kind: type[Exception] = ValueError, function: str | None = None
) -> Exception:
    """Returns the error "FUNCTION: ARGUMENT: TEXT". function: default the public one that was called."""
    function = _public_function(str(name)) if function is None else function
    front = f"{function}: " if function else ""
    text = re.sub(r"^[\w.]+: (?=[^:]+: expected)", "", str(text))  # without the function of another of these errors
    return kind(f"{front}{name}: {text}")


def _public_function(name: str) -> str:
    """Returns the innermost public function on the stack with this argument, else the innermost one, "" for none.

    Public are the names of packages, of `testing` and of the adapters in one file. Traces of torch.compile get "".
    """
    if torch.compiler.is_compiling():
        return ""
    modules = [(path, m) for path, m in list(sys.modules.items()) if path.startswith("pagedtree")]
    lists = [vars(m) for _, m in modules if hasattr(m, "__path__")]
    for path, m in modules:
        if path == "pagedtree.testing" or path.rpartition(".")[0] == "pagedtree.integrations":
            lists.append({name: getattr(m, name) for name in getattr(m, "__all__", ())})

    def is_public(thing: Any, name: str) -> bool:
        found = [inspect.unwrap(names[name]) for names in lists if name in names]
        # Packages also have names that they import from private modules.
        listed = [one for one in found if "._" not in str(getattr(one, "__module__", ""))]
        return any(thing in (one, getattr(one, "__code__", None)) for one in listed)

    outer, argument, frame = "", re.split(r"\W", name)[0], inspect.currentframe()
    while frame := frame and frame.f_back:
        if not frame.f_globals.get("__name__", "").startswith("pagedtree."):
            continue
        # The frame of a decorator stands for the function that it wraps.
        code = getattr(inspect.unwrap(frame.f_locals.get("function")), "__code__", frame.f_code)  # type: ignore[arg-type]
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        function = code.co_name if is_public(code, code.co_name) else ""
        if arguments[:1] in (("self",), ("cls",)):
            owner = frame.f_locals.get(arguments[0])
            classes = inspect.getmro(owner if isinstance(owner, type) else type(owner))
            function = next((kind.__name__ for kind in classes if is_public(kind, kind.__name__)), "")
            if code.co_name not in ("__init__", "__post_init__"):
                function = f"{function}.{code.co_name}" if function and not code.co_name.startswith("_") else ""
        if function and argument in arguments:
            return function
        outer = outer or function
    return outer


def expect_type(name: str, value: object, expected: type) -> None:
    """Raises TypeError for a wrong type of an argument that Python reads before an op does."""
    if not isinstance(value, expected):
        raise refusal(name, f"a {expected.__name__}", type(value).__name__, TypeError)


def expect_integers(**values: object) -> None:
    """Raises TypeError where a value is not an integer."""
    for name, value in values.items():
        if type(value) is not int and not isinstance(value, _NUMBERS[int][0]):
            raise refusal(name, "an integer", _shown(value), TypeError)


def expect_dims(form: str, **tensors: Tensor | None) -> None:
    """Raises ValueError unless a tensor has the number of dimensions in `form`, e.g. "[B, max_pages]"."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() != form.count(",") + 1:
            raise refusal(name, form, f"shape {[*tensor.shape]}")


def expect_shape(shape: Sequence[int], **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != tuple(shape):
            raise refusal(name, f"shape {[*shape]}", [*tensor.shape])


def expect_one_device(op: str, /, **tensors: Any) -> None:
    """Raises RuntimeError, as the ops do, unless tensors, or lists of them, are all on the first one's device."""
    first: tuple[str, torch.device] | None = None
    for name, value in tensors.items():
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, Tensor):
                continue
            first = first or (name, tensor.device)
            if tensor.device != first[1]:
                raise refusal(name, f"the device of {first[0]}, {first[1]}", tensor.device, RuntimeError, op)


def checked(
    *, integers: Iterable[str] = (), written: Iterable[str] = (), own: Iterable[str] = (), one_device: bool = True
) -> Callable[[Function], Function]:
    """Makes a function refuse arguments that are not of their annotated types, for functions that are not a single op.

    integers: tensors that must be int32 or int64. written: tensors whose elements must not share memory. own: arguments
    that the function checks itself. one_device: also refuses tensors on different devices. Tensors on "meta" are
    refused. Raises TypeError and ValueError that name the argument. Under torch.compile nothing is checked.
    """

    def decorate(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)
        hints: dict[str, Any] = {}
        integral, outputs = frozenset(integers), frozenset(written)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if not hints:  # at the first call, when every name of the annotations exists
                hints.update({name: hint for name, hint in get_type_hints(function).items() if name not in own})
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            for name, value in arguments.items():
                if name in hints:
                    _expect(name, value, hints[name])
            if one_device:
                try:
                    expect_one_device(function.__name__, **arguments)
                except RuntimeError as error:
                    raise ValueError(str(error)) from None
            for name, value in arguments.items():
                if name in hints:
                    for tensor in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(tensor, Tensor):
                            _expect_tensor(name, tensor, name in integral, name in outputs)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _expect_tensor(name: str, tensor: Tensor, is_integer: bool, is_written: bool) -> None:
    if tensor.is_meta:
        raise refusal(name, "a tensor with values", "one on meta")
    if is_integer and tensor.dtype not in (torch.int32, torch.int64):
        raise refusal(name, "int32 or int64", tensor.dtype)
    if is_written and any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise refusal(name, "elements that share no memory", f"strides {list(tensor.stride())}")


def _expect(name: str, value: object, hint: Any) -> None:
    """Raises TypeError unless `value` matches the type `hint`, ValueError for an integer too large."""
    if _fits(value, hint):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise refusal(name, "an integer of 64 bits", value)
        return
    if get_origin(hint) is Sequence and _fits(value, Sequence):
        element = get_args(hint)[0]
        for i, part in enumerate(value):  # type: ignore[arg-type, var-annotated]
            _expect(f"{name}[{i}]", part, element)
    raise refusal(name, _words(hint), _shown(value), TypeError)


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if hint is Any:
        return True
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint][0])
    if Sequence in (hint, origin):
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
            return False
        return all(_fits(part, element) for element in get_args(hint) for part in value)
    if origin is tuple:
        kinds = get_args(hint)
        if not isinstance(value, (tuple, list)) or len(value) != len(kinds):
            return False
        return all(_fits(part, kind) for part, kind in zip(value, kinds, strict=True))
    return isinstance(value, origin or hint)


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, parts))
    if hint in _NUMBERS:
        return _NUMBERS[hint][1]
    if origin is tuple:
        return f"({', '.join(map(_words, parts))})"
    if Sequence in (hint, origin):
        return "a sequence"
    return f"a {(origin or hint).__name__}"


def _shown(value: object) -> str:
    plain = value is None or isinstance(value, (bool, int, float, str))
    return f"{value!r:.40}" if plain else type(value).__name__
