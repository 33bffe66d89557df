"""Temporary replacement of modules' forward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn


@contextmanager
def with_forwards(
    forwards: Iterable[tuple[nn.Module, Callable[..., Any] | None]], name: str = "forward"
) -> Iterator[None]:
    """Sets these functions as the modules' attribute `name` inside the block."""
    with ExitStack() as stack:
        for module, forward in forwards:
            attributes = vars(module)
            # A model that drafts for itself is here twice, one block within the other.
            stack.callback(attributes.update, {name: attributes[name]} if name in attributes else {})
            stack.callback(attributes.pop, name, None)
            attributes[name] = forward
        yield


def with_functions(forward: Any, **functions: Callable[..., Any]) -> FunctionType:
    """Returns a copy of a forward that uses these functions in place of its module's functions of the same names."""
    namespace = {**forward.__globals__, **functions}
    copy = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Runs the model's modules without `torch.compile` inside the block."""
    modules = list(model.modules())
    called = [(module, None) for module in modules if module._compiled_call_impl is not None]
    plain = ((module, compiled_from(module)) for module in modules)
    own = ((m, f if "forward" in vars(m) else MethodType(f, m)) for m, f in plain if f is not None)
    with with_forwards(called, "_compiled_call_impl"), with_forwards(own):
        yield


def compiled_from(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the function that `torch.compile` made the module's forward from, or None."""
    forward: Callable[..., Any] | None = getattr(module.forward, "_torchdynamo_orig_callable", None)
    return forward
