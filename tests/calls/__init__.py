"""One valid call of every public function that takes values from its user.

`tests/ops/test_calls.py` compiles, traces and differentiates them and gives them wrong types; `fuzz.py` changes them to
hostile ones; `raw_case.py` takes down the raw ops that they call. The ops' calls are in `calls/ops.py` and
`calls/recurrent.py`. Importing `calls.adapters` and `calls.checkpoints` makes those of the integrations known, too.
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


# ---- values made of parts


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (key, part) of a value that is made of parts."""
    if hasattr(value, "_asdict"):
        yield from value._asdict().items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a value, in the order of its parts."""
    if isinstance(value, Tensor):
        yield value
    for _, part in parts_of(value):
        yield from tensors_of(part)


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Returns `value` with `new` at `path`, the keys of `parts_of` from the outside to the inside."""
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
    """Returns `value` with change(tensor) in place of each tensor."""
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
        written: names of the arguments that it may write to.
        fixed: names of those that keep their value, because a large one is what was asked for.
        receiver: the argument whose method is called, and which keeps its type.
        is_for_host: whether the function reads values or makes Python objects, and so is not for compiled code.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    written: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    receiver: str = ""
    is_for_host: bool = False

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Returns the call with change(tensor) in place of each tensor among its arguments."""
        return replace(self, arguments=mapped(self.arguments, change))

    def on_memory(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Returns the call on change(memory) of its tensors' memory; what shares memory still does."""
        memory: dict[int, Tensor] = {}

        def moved(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in memory:
                memory[storage._cdata] = change(torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage))
            return memory[storage._cdata].view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())

        return self.mapped(moved)

    def results(self, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Calls `function`, or that of the call, on copies of the arguments.

        Returns the tensors of its result and, behind them, those that it may have written to.
        """
        arguments = self.on_memory(Tensor.clone).arguments
        result = (function or self.function)(**arguments)
        return list(tensors_of([result, *(arguments[name] for name in self.written)]))


_CALLS: dict[str, Callable[[], Call]] = {}


def valid_call(make: Callable[[], Call]) -> Callable[[], Call]:
    """Makes a function that returns a Call one of those that are known, by its name."""
    _CALLS[make.__name__] = make
    return make


def valid_calls(**makes: Callable[[], Call]) -> None:
    """Makes calls known by their names."""
    _CALLS.update(makes)


def names(*modules: str) -> list[str]:
    """Returns the names of all known calls, or of those that these modules make known."""
    return sorted(name for name, make in _CALLS.items() if not modules or make.__module__ in modules)


def make(name: str) -> Call:
    """Returns a call on CPU tensors, made anew so that nothing a call did to its arguments reaches the next one."""
    torch.manual_seed(0)
    with use_backend("cpu"), torch.device("cpu"):
        return _CALLS[name]()


from calls import ops, recurrent  # noqa: E402, F401 - they make their calls known
