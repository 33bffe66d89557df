"""The core suite's choice among the combinations of a test's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

from each_value import of_each_value

VALUES = {"backend": ["cpu", "simt"], "size": [1, 2, 3, 4], "dtype": ["half", "float"], "params": [{}, {"a": 1}]}


@dataclass(eq=False)
class Case:
    callspec: SimpleNamespace


def test_every_value_stays_on_every_backend() -> None:
    cases: list[Any] = [
        Case(SimpleNamespace(params=dict(zip(VALUES, combination, strict=True))))
        for combination in product(*VALUES.values())
    ]
    sample = [case.callspec.params for case in of_each_value(cases)]
    assert len(sample) == 2 * 4  # as many as the parameter with most values has, for each backend
    for backend, (name, values) in product(VALUES["backend"], VALUES.items()):
        on_backend = [params[name] for params in sample if params["backend"] == backend]
        assert all(value in on_backend for value in values if name != "backend")
