"""Raw ops leak no memory, also when they refuse."""

from __future__ import annotations

import contextlib

import pytest
import torch
from calls.raw import RawCall, op_names, raw_calls
from support.memory import allocated, growth, resident


def refused(call: RawCall) -> None:
    with contextlib.suppress(RuntimeError):
        call(**{call.tensor_arguments()[-1]: torch.zeros(1, 1, 1, dtype=torch.complex64)})
        raise AssertionError(call.name)


def calls_of(name: str) -> list[RawCall]:
    return [call for call in raw_calls() if call.name == name]


@pytest.mark.parametrize("name", op_names())
def test_ops_leak_no_memory(name: str) -> None:
    """A leaked string has 48 bytes, a tensor handle or optional value at least 24."""
    for call in calls_of(name):
        assert growth(call, 200, allocated, 50) < 8
        assert growth(lambda call=call: refused(call), 100, allocated, 50) < 8


@pytest.mark.slow
@pytest.mark.parametrize("name", op_names())
def test_the_process_does_not_grow(name: str) -> None:
    call = calls_of(name)[0]
    assert growth(call, 40_000, resident, warm_up=4000) < 12
