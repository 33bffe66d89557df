"""Runs cases at a place one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pagedtree.check.case import CPU, Case, Measurement, NotApplicable, Place, Results, environment

__all__ = ["FAILED", "MEASURED", "NOT_APPLICABLE", "NOT_RUN", "OK", "Row", "context_is_lost", "run", "run_row"]

OK, FAILED, NOT_APPLICABLE, NOT_RUN, MEASURED = "ok", "failed", "not applicable", "not run", "measured"
PORTABLE = "portable"


@dataclass
class Row:
    """The outcome of a case.

    Attributes:
        status: OK, FAILED, NOT_APPLICABLE, NOT_RUN or MEASURED.
        against: the reference of the comparison.
        detail: the error, the reason for no verdict, or the measurement in words.
        numbers: the measured numbers.
    """

    name: str
    group: str
    status: str
    against: str = ""
    detail: str = ""
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)


def run(cases: Sequence[Case | Measurement], place: Place, started: Callable[[str], None]) -> Iterator[Row]:
    """Returns one row per case, up to one that left the device unusable."""
    for case in cases:
        started(case.name)
        row = run_row(case, place)
        yield row
        if row.status == FAILED and context_is_lost(place):
            return


def run_row(case: Case | Measurement, place: Place) -> Row:
    row = Row(case.name, case.group, OK)
    begin = time.perf_counter()
    try:
        with environment("PAGEDTREE_CHECK", "0"):  # values out of range are meant to reach the backend
            _judge(row, case, place)
    except NotApplicable as reason:
        row.status, row.detail = NOT_APPLICABLE, str(reason)
    except Exception as error:
        row.status, row.detail = FAILED, f"raised {type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - begin
    return row


def _judge(row: Row, case: Case | Measurement, place: Place) -> None:
    if case.backends is not None and place.backend not in case.backends:
        raise NotApplicable(f"only on {' and '.join(case.backends)}")
    if isinstance(case, Measurement):
        with place.active():
            row.numbers, row.detail = case.run(place)
        row.status = MEASURED
        return
    row.against, expected = _expectation(case, place)
    with place.active():
        results = case.run(place)
        results = {name: tensor.cpu() for name, tensor in results.items()}  # waits: an error belongs to this row
    row.detail = case.difference(results, expected())
    row.status = FAILED if row.detail else OK


def _expectation(case: Case, place: Place) -> tuple[str, Callable[[], Results]]:
    """Chooses the reference for `case`: its name, and a function that never runs the same code."""

    def on_cpu(function: Callable[[], Results]) -> Callable[[], Results]:
        def call() -> Results:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # for work so small, waiting for the others takes longer
            try:
                with CPU.active():
                    return function()
            finally:
                torch.set_num_threads(threads)

        return call

    if case.loops is not None and (case.always_loops or place.backend == "cpu"):
        return case.against, on_cpu(case.loops)
    if place.backend != "cpu":
        return "the CPU backend", on_cpu(case.expected or (lambda: case.run(CPU)))

    def portably() -> Results:
        with environment("PAGEDTREE_CPU_ISA", PORTABLE):
            return case.run(CPU)

    from pagedtree import _C  # the ops do without it

    if _C.active_isa() == PORTABLE:
        raise NotApplicable("this row compares with the portable instruction set, which is the active one here")
    return "the portable instruction set", on_cpu(portably)


def context_is_lost(place: Place) -> bool:
    """Returns whether an error has left the device unusable (an illegal access on a GPU)."""
    if place.device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=place.device, dtype=torch.float32).item()
        torch.cuda.synchronize(place.device)
    except RuntimeError:
        return True
    return False
