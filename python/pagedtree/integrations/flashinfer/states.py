"""Joining partial attention results in FlashInfer's convention: log-sum-exps are in base 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedtree import merge_states as join
from pagedtree._arguments import checked, expect_dims, expect_shape, refusal


@checked()
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over two disjoint sets of keys (`pagedtree.merge_states`).

    v_a, v_b: [T, heads, dim]; s_a, s_b: fp32 [T, heads], log-sum-exps in base 2. Returns (v, s) over the union. Raises
    ValueError for wrong shapes or dtypes.
    """
    v, s = join(v_a, s_a * math.log(2), v_b, s_b * math.log(2))
    return v, s / math.log(2)


@checked(written=("v", "s"))
def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Writes the result of `merge_state` to v and s. mask: bool [T], the rows to write; default all."""
    new_v, new_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        expect_shape(v.shape[:1], mask=mask)
        new_v = torch.where(mask.bool()[:, None, None], new_v, v)
        new_s = torch.where(mask.bool()[:, None], new_s, s)
    v.copy_(new_v)
    s.copy_(new_s)


@checked()
def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over any number of disjoint sets of keys.

    v: [T, states, heads, dim]; s: fp32 [T, states, heads], log-sum-exps in base 2. Returns (v, s) over the union,
    joined in order. Raises ValueError for wrong shapes or dtypes.
    """
    expect_dims("[rows, states, heads, dim]", v=v)
    if s.shape != v.shape[:3] or v.shape[1] == 0:
        raise refusal("s", f"shape {[*v.shape[:3]]} with at least one state", [*s.shape])
    out, natural = v[:, 0], s[:, 0] * math.log(2)
    for i in range(1, v.shape[1]):
        out, natural = join(out, natural, v[:, i], s[:, i] * math.log(2))
    return out.clone() if v.shape[1] == 1 else out, natural / math.log(2)
