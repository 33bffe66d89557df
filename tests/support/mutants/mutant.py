"""A mutant: a mistake once made in the sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CASES", "Mutant", "family"]

CASES = "tests/ops/test_cases.py"


@dataclass(frozen=True)
class Mutant:
    """`line` of csrc/`file` becomes `broken`; one of `tests` that match `only` must fail on the backend.

    For backend "python" the file is in python/pagedtree, and nothing is built.
    """

    name: str
    file: str
    line: str
    broken: str
    tests: tuple[str, ...] = (CASES,)
    backend: str = "cpu"
    only: str = "cpu or not simt"


def family(path: str, tests: tuple[str, ...], backend: str, only: str) -> Callable[[str, str, str, str], Mutant]:
    """Returns a function of a name, a file's part of `path`, a line and its replacement."""

    def of_family(name: str, file: str, line: str, broken: str) -> Mutant:
        return Mutant(name, path.format(file), line, broken, tests, backend, only)

    return of_family
