"""Malformed values give equal results everywhere, unless docs/concepts.md leaves it open."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from raw_case import op_names, raw_calls
from torch import Tensor

from pagedtree.testing import backends, use_backend

FAR = 2**31 - 1

# Backend-specific plans; words that must come from the round before.
OPEN = ("attention_plan", "step_shards", "weigh_shards")
# Sums in a backend's order; their operands stay unchanged.
ROUNDED = ("tree_attention", "tree_attention.out", "tree_attention.without_lse", "tree_delta_rule", "tree_conv1d",
           "advance_state", "merge_states")  # fmt: skip
SUMMED = ("q", "k", "v", "k_cache", "v_cache", "x", "weight", "bias", "out_a", "out_b")
# Left open by docstrings: rows that share a slot, non-finite scales.
LEFT_OPEN = {"append_kv": ("slots",), "rope_append": ("slots",), "rope_append.out": ("slots",),
             "compact_kv": ("page_table",), "tree_attention": ("k_scale", "v_scale"),
             "advance_state": ("state_index",), "advance_conv": ("state_index",)}  # fmt: skip
INTEGERS = (0, 1, -1, 2, -2, 3, 5, 7, 8, 9, 12, 63, 2**15, FAR, -FAR - 1, 2**30)
LARGE = (2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))


def with_bad_values(rng: random.Random, t: Tensor) -> Tensor:
    t = t.clone()
    values = t.view(-1) if t.is_contiguous() else t.reshape(-1)
    pool: tuple[Any, ...] = INTEGERS + (LARGE if t.dtype == torch.int64 else ())
    if t.dtype.is_floating_point:
        pool = (0.0, 1.0, -448.0, float("nan")) if t.dtype == torch.float8_e4m3fn else FLOATS
    for _ in range(rng.randrange(1, 4) if values.numel() else 0):
        value = torch.tensor(rng.choice(pool), dtype=torch.float32 if t.dtype.is_floating_point else torch.int64)
        values[rng.randrange(values.numel())] = value.to(t.dtype)
    return values.view(t.shape)


def same(name: str, a: Tensor, b: Tensor) -> bool:
    if name in ROUNDED and a.dtype.is_floating_point:
        return torch.allclose(a.double().cpu(), b.double().cpu(), rtol=2e-2, atol=2e-2, equal_nan=True)
    return a.cpu().view(torch.uint8).equal(b.cpu().view(torch.uint8)) or a.allclose(b, 0, 0, equal_nan=True)


@pytest.mark.skipif("simt" not in backends(), reason="built without simt")
@pytest.mark.parametrize("name", [name for name in op_names() if name not in OPEN])
def test_bad_values_give_the_same_on_every_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", "reverse")
    rng, calls = random.Random(0), [call for call in raw_calls() if call.name == name]
    for _ in range(60):
        call = rng.choice(calls).on_memory(Tensor.clone)
        left_out = LEFT_OPEN.get(name, ()) + (SUMMED if name in ROUNDED else ())
        names = [key for key in call.tensors() if key not in left_out]
        keys = rng.sample(names, min(len(names), rng.randrange(1, 3)))
        for key in keys:
            bad = with_bad_values(rng, call.arguments[key])
            # Decays above 0 or NaN are unspecified.
            call.arguments[key] = bad.nan_to_num(nan=-1.0, neginf=-torch.inf).clamp(max=0) if key == "g" else bad
        results = []
        for backend in ("cpu", "simt"):
            with use_backend(backend):
                results.append(call.named_results())
        for key, expected in results[0].items():
            got = results[1][key]
            assert same(name, expected, got), ({k: call.arguments[k] for k in keys}, key, expected, got)
