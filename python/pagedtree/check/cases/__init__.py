"""The cases, one module a family of ops."""

from __future__ import annotations

from collections.abc import Iterator

from pagedtree.check.case import Case, Measurement, Place
from pagedtree.check.cases import (
    attention,
    cache,
    capture,
    drafting,
    instructions,
    rates,
    rules,
    shards,
    step,
    trees,
    verification,
)

__all__ = ["all_cases"]


def all_cases(place: Place) -> Iterator[Case | Measurement]:
    """Every row, also those that do not apply at `place`; captures come last, as a failed one may disturb others."""
    for family in (instructions, trees, cache, step, attention, verification, rules, shards, drafting):
        yield from family.cases()
    yield from rates.measurements()
    yield from capture.cases(place)
