"""Valid calls of the ops of recurrent layers; importing this file makes them known to the fuzzer."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_calls import Call, draft_trees, valid_call
from step_case import int32

import pagedtree as pt


def _recurrence() -> dict[str, Any]:
    return {
        "k": torch.randn(8, 1, 8), "v": torch.randn(8, 2, 16), "g": -torch.rand(8, 2, 8), "beta": torch.rand(8, 2),
        "state": torch.randn(3, 2, 8, 16), "state_index": int32([1, 0]), "trees": draft_trees(), "l2norm": True,
    }  # fmt: skip


def _accepted() -> dict[str, Any]:
    return {"accept_index": int32([[0, 1, 3], [0, 1, -1]]), "num_accepted": int32([2, 1])}


@valid_call
def tree_delta_rule() -> Call:
    return Call(pt.tree_delta_rule, {"q": torch.randn(8, 1, 8), **_recurrence(), "scale": 0.5})


@valid_call
def causal_delta_rule() -> Call:
    arguments = {"q": torch.randn(8, 1, 8), **_recurrence(), "trees": None, "cu_seqlens": int32([0, 5, 8])}
    return Call(pt.tree_delta_rule, arguments)


@valid_call
def advance_state() -> Call:
    return Call(pt.advance_state, {**_recurrence(), **_accepted()}, written=("state",))


@valid_call
def tree_conv1d() -> Call:
    arguments = {"x": torch.randn(8, 6), "weight": torch.randn(6, 4), "bias": torch.randn(6)}
    state = {"conv_state": torch.randn(3, 6, 3), "state_index": int32([1, 0]), "trees": draft_trees()}
    return Call(pt.tree_conv1d, {**arguments, **state, "activation": "silu"})


@valid_call
def advance_conv() -> Call:
    arguments = {"conv_state": torch.randn(3, 6, 3), "state_index": int32([1, 0]), "x": torch.randn(8, 6)}
    return Call(pt.advance_conv, {**arguments, "trees": draft_trees(), **_accepted()}, written=("conv_state",))
