"""Registers valid calls of recurrent layers' ops."""

from __future__ import annotations

from typing import Any

import torch
from support import int32
from torch import Tensor

import pagedtree as pt
from calls import Call, valid_calls
from calls.ops import draft_trees


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def _recurrence() -> dict[str, Any]:
    return {
        "k": _rows(8, 1, 8), "v": _rows(8, 2, 16), "g": -torch.rand(8, 2, 8), "beta": torch.rand(8, 2),
        "state": torch.randn(3, 2, 8, 16), "state_index": int32([1, 0]), "trees": draft_trees(), "l2norm": True,
        "l2norm_eps": 1e-5,
    }  # fmt: skip


def _causal(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replaces trees by prompts, with head decays, without beta."""
    if "g" in arguments:
        arguments |= {"g": arguments["g"][..., 0].contiguous(), "beta": None}
    return {**arguments, "trees": None, "cu_seqlens": int32([0, 5, 8])}


def _accepted() -> dict[str, Any]:
    return {"accept_index": int32([[0, 1, 3], [0, 1, -1]]), "num_accepted": int32([2, 1])}


def _convolution() -> dict[str, Any]:
    arguments = {"x": _rows(8, 6), "weight": _rows(6, 4), "bias": _rows(6)}
    state = {"conv_state": _rows(3, 6, 3), "state_index": int32([1, 0]), "trees": draft_trees()}
    return {**arguments, **state, "activation": "silu"}


def _rows_to_keep() -> dict[str, Any]:
    state = {"conv_state": _rows(3, 6, 3), "state_index": int32([1, 0])}
    return {**state, "x": _rows(8, 6), "trees": draft_trees()}


valid_calls(
    tree_delta_rule=lambda: Call(pt.tree_delta_rule, {"q": _rows(8, 1, 8), **_recurrence(), "scale": 0.5}),
    causal_delta_rule=lambda: Call(pt.tree_delta_rule, {"q": _rows(8, 1, 8), **_causal(_recurrence())}),
    advance_state=lambda: Call(pt.advance_state, {**_recurrence(), **_accepted()}, written=("state",)),
    causal_advance_state=lambda: Call(pt.advance_state, _causal(_recurrence()), written=("state",)),
    tree_conv1d=lambda: Call(pt.tree_conv1d, _convolution()),
    causal_conv1d=lambda: Call(pt.tree_conv1d, _causal(_convolution())),
    advance_conv=lambda: Call(pt.advance_conv, {**_rows_to_keep(), **_accepted()}, written=("conv_state",)),
    causal_advance_conv=lambda: Call(pt.advance_conv, _causal(_rows_to_keep()), written=("conv_state",)),
)
