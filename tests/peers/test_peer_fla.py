"""flash-linear-attention's tests of recurrent kernels, on `tree_delta_rule` and `advance_state`."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from peer_source import PeerSource
from torch import Tensor

from pagedtree import advance_state, tree_delta_rule

SOURCE = PeerSource("fla")


def recurrent(q, k, v, *, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel=False):
    """Serves [B, T, heads, dim]; its kernels normalise q and k as `l2norm` does."""
    if q.shape[-1] % 8:
        pytest.xfail("Dk and Dv are multiples of 8")
    batch, rows, dtype = q.shape[0], q.shape[1], v.dtype
    offsets = torch.arange(batch + 1, dtype=torch.int32) * rows
    index, state = torch.arange(batch, dtype=torch.int32), initial_state.detach().clone()
    q, k, v, g, beta = (x.detach().flatten(0, 1) for x in (q, k, v, g, beta))
    tensors = k.to(dtype), v, g.float(), beta.float()
    options = {"cu_seqlens": offsets, "l2norm": use_qk_l2norm_in_kernel}
    out = tree_delta_rule(q.to(dtype), *tensors, state, index, None, scale=scale, **options)
    advance_state(state, index, *tensors, None, **options)
    return out.view(batch, rows, *out.shape[1:]), state if output_final_state else None


def repeat(x: Tensor, pattern: str, g: int) -> Tensor:
    assert pattern == "b t h d -> b t (h g) d"
    return x.repeat_interleave(g, 2)


KNOWN = {"torch": torch, "F": torch.nn.functional, "pytest": pytest, "repeat": repeat, "device": "cpu"}
KNOWN |= {"IS_INTEL_ALCHEMIST": False, "logger": logging.getLogger("fla"), "FLA_CI_ENV": False, "warnings": logging}
KNOWN |= {"fused_recurrent_gated_delta_rule": recurrent, "fused_recurrent_kda": recurrent}
KNOWN |= {"triton": SimpleNamespace(next_power_of_2=lambda n: 1 << (n - 1).bit_length())}
SOURCE.take("fla/utils/_testing.py", "get_abs_err", "get_err_ratio", "assert_close", known=KNOWN)
SOURCE.take("fla/ops/gated_delta_rule/naive.py", "naive_recurrent_gated_delta_rule", known=KNOWN)
SOURCE.take("fla/ops/kda/naive.py", "naive_recurrent_kda", known=KNOWN)
test_gated_delta_rule = SOURCE.take("tests/ops/test_gdn.py", "test_fused_recurrent", known=KNOWN)[
    "test_fused_recurrent"
]
test_kda = SOURCE.take("tests/ops/test_kda.py", "test_fused_recurrent", known=KNOWN)["test_fused_recurrent"]
