"""A mutant: a mistake once made in the sources."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "Mutant"]

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
