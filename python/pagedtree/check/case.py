"""A case: one call of one op, its place, and the reference for its results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedtree.testing import use_backend

__all__ = [
    "CPU",
    "Case",
    "Difference",
    "Measurement",
    "NotApplicable",
    "Place",
    "Results",
    "equal",
    "relative",
    "within",
]

Results = dict[str, Tensor]
# (found, expected) -> description of the error, "" if there is none.
Difference = Callable[[Tensor, Tensor], str]


@dataclass(frozen=True)
class Place:
    device: torch.device
    backend: str

    @contextmanager
    def active(self) -> Iterator[None]:
        with use_backend(self.backend):
            yield

    def put(self, value: Any) -> Any:
        """Returns the value with its tensors on the device, including tensors in lists, dicts and dataclasses."""
        if isinstance(value, Tensor):
            return _copy(value, self.device)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.put, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.put, value))
        if isinstance(value, dict):
            return {key: self.put(x) for key, x in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: self.put(getattr(value, field.name)) for field in fields(value)})
        return value


class NotApplicable(Exception):
    """Raised by a case that this machine cannot answer; says why."""


CPU = Place(torch.device("cpu"), "cpu")


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy with the same strides and the whole spanned storage; `.to()` would pack it."""
    if tensor.numel() == 0:
        return tensor.to(device, copy=True)
    first = tensor.storage_offset()
    size = first + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.as_strided((size,), (1,), 0).to(device, copy=True)
    return storage.as_strided(tensor.shape, tensor.stride(), first)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: "op/variant/...", unique.
        ops: names in torch.ops.pagedtree that the case calls and judges.
        run: calls them at a place and returns the results and all written tensors.
        loops: the expected results, by plain loops. None: only the CPU backend can compute them independently.
        expected: the CPU backend's reference for other backends; default `run`.
        always_loops: compare with the loops on every device.
        compare: by the name of a result, its tolerance; all others must be equal.
        against: describes `loops` for the reader.
        backends: where the case makes sense; None: everywhere.
    """

    name: str
    ops: tuple[str, ...]
    run: Callable[[Place], Results]
    loops: Callable[[], Results] | None = None
    expected: Callable[[], Results] | None = None
    always_loops: bool = False
    compare: dict[str, Difference] | None = None
    against: str = "plain loops"
    backends: tuple[str, ...] | None = None

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    def difference(self, found: Results, expected: Results) -> str:
        if found.keys() != expected.keys():
            return f"results {', '.join(found)} instead of {', '.join(expected)}"
        compare = self.compare or {}
        for name, tensor in expected.items():
            problem = compare.get(name, equal)(found[name].cpu(), tensor.cpu())
            if problem:
                return f"{name}: {problem}"
        return ""


@dataclass(frozen=True)
class Measurement:
    """A row that is measured, not judged: run(place) gives the numbers and their text."""

    name: str
    run: Callable[[Place], tuple[dict[str, float], str]]
    backends: tuple[str, ...] | None = None

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within a block; the backends read it at each call."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if previous is not None:
            os.environ[name] = previous


# Tolerances -----------------------------------------------------------------------------------------------------------


def _shapes(found: Tensor, expected: Tensor, *, dtype: bool = True) -> str:
    if found.shape != expected.shape:
        return f"shape {list(found.shape)} instead of {list(expected.shape)}"
    if dtype and found.dtype != expected.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    return ""


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _first(wrong: Tensor, found: Tensor, expected: Tensor, limit: str) -> str:
    if not wrong.any():
        return ""
    at = wrong.nonzero()[0].tolist()
    values = (tensor[tuple(at)].item() for tensor in (found, expected))
    return "{} of {} elements differ{}, first at {}: {} instead of {}".format(
        int(wrong.sum()), wrong.numel(), limit, at, *values
    )


def equal(found: Tensor, expected: Tensor) -> str:
    """Describes where numbers differ, "" if nowhere; NaN equals NaN."""
    x, y = _wide(found), _wide(expected)
    return _shapes(found, expected) or _first((x != y) & ~((x != x) & (y != y)), x, y, "")


def within(absolute: float, relative: float = 0.0) -> Difference:
    """Elements differ by at most absolute + relative * |expected|; infinities and NaN are equal."""

    def difference(found: Tensor, expected: Tensor) -> str:
        problem = _shapes(found, expected, dtype=False)
        if problem:
            return problem
        x, y = found.double(), expected.double()
        same = (x == y) | (x.isnan() & y.isnan())
        close = (x - y).abs() <= absolute + relative * y.abs()
        limit = f" by more than {absolute:g} + {relative:g} of the value"
        return _first(~(same | (close & y.isfinite())), x, y, limit)

    return difference


def relative(limit: float, floor: float = 1e-3) -> Difference:
    """Rows (the last dimension) differ by at most `limit` times the larger of their length and `floor` x the typical
    length of a row; rows of zeros are equal."""

    def difference(found: Tensor, expected: Tensor) -> str:
        problem = _shapes(found, expected, dtype=False)
        if problem or not expected.numel():
            return problem
        x, y = found.double(), expected.double()
        if x.isnan().any():
            return _first(x.isnan(), x, y, "")
        length = y.norm(dim=-1)
        typical = float(length[length > 0].mean()) if (length > 0).any() else 0.0
        error = (x - y).norm(dim=-1) / length.clamp(min=max(floor * typical, 1e-30))
        error = torch.where((x == y).all(dim=-1), 0.0, error)
        worst = float(error.max())
        if worst <= limit:
            return ""
        at = (error == error.max()).nonzero()[0].tolist()
        return (
            f"{int((error > limit).sum())} of {error.numel()} rows are off by more than {limit:.2%} of their length,"
            f" worst {at} by {worst:.2%}"
        )

    return difference
