"""One valid call of every public function with value arguments.

`tests/ops/test_calls.py` compiles and differentiates them, and changes types; `fuzz.py` makes them hostile;
`raw.py` records their raw ops. Importing `calls.adapters` and `calls.checkpoints` registers integrations' calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedtree.testing import use_backend

__all__ = ["Call", "changed", "make", "mapped", "names", "parts_of", "tensors_of", "valid_call", "valid_calls"]


# ---- nested values


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (key, part) of a nested value."""
    if hasattr(value, "_asdict"):
        yield from value._asdict().items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields a value's tensors, in order."""
    if isinstance(value, Tensor):
        yield value
    for _, part in parts_of(value):
        yield from tensors_of(part)


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Returns `value` with `new` at `path`, keys of `parts_of` from outside in."""
    if not path:
        return new
    key, *rest = path
    part = changed(dict(parts_of(value))[key], tuple(rest), new)
    if hasattr(value, "_replace"):
        return value._replace(**{key: part})
    if dataclasses.is_dataclass(value):
        return replace(value, **{key: part})
    if isinstance(value, dict):
        return {**value, key: part}
    return type(value)(part if i == key else other for i, other in enumerate(value))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replaces each tensor by change(tensor)."""
    if isinstance(value, Tensor):
        return change(value)
    for key, part in list(parts_of(value)):
        new = mapped(part, change)
        if new is not part:
            value = changed(value, (key,), new)
    return value


# ---- calls


@dataclass
class Call:
    """`function(**arguments)`.

    Attributes:
        written: arguments that it may write to.
        fixed: arguments that keep their value, as large ones are legitimate.
        receiver: the argument whose method is called; keeps its type.
        is_for_host: reads values or makes Python objects, so does not compile.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    written: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    receiver: str = ""
    is_for_host: bool = False

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Replaces each tensor argument by change(tensor)."""
        return replace(self, arguments=mapped(self.arguments, change))

    def on_memory(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Replaces the tensors' memory by change(memory); shared memory stays shared."""
        memory: dict[int, Tensor] = {}

        def moved(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in memory:
                memory[storage._cdata] = change(torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage))
            return memory[storage._cdata].view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())

        return self.mapped(moved)

    def results(self, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Calls `function`, or the call's own, on copies; returns the result's tensors, then those written."""
        arguments = self.on_memory(Tensor.clone).arguments
        result = (function or self.function)(**arguments)
        return list(tensors_of([result, *(arguments[name] for name in self.written)]))


_CALLS: dict[str, Callable[[], Call]] = {}


def valid_call(make: Callable[[], Call]) -> Callable[[], Call]:
    """Registers a Call's maker by name."""
    _CALLS[make.__name__] = make
    return make


def valid_calls(**makes: Callable[[], Call]) -> None:
    """Registers makers by their keywords."""
    _CALLS.update(makes)


def names(*modules: str) -> list[str]:
    """Returns the names of all registered calls, or these modules'."""
    return sorted(name for name, make in _CALLS.items() if not modules or make.__module__ in modules)


def make(name: str) -> Call:
    """Returns a new call on CPU tensors, unaffected by others."""
    torch.manual_seed(0)
    with use_backend("cpu"), torch.device("cpu"):
        return _CALLS[name]()


from calls import ops, recurrent  # noqa: E402, F401 - registers their calls
