"""rope_append beside plain loops in float32, bit for bit, and what it refuses; `check` has rows of other shapes."""

from __future__ import annotations

from typing import Any

import torch
from cache_case import FP8, raw
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedtree import append_kv, rope_append
from pagedtree.reference import kv_cache as loops


def arguments(device: torch.device, **changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.ones((2, 4, 8), device=device),
        "k": torch.ones((2, 3, 8), device=device),
        "v": torch.ones((2, 3, 4), device=device),
        "positions": torch.tensor([0, 4], device=device),
        "cos_sin": torch.ones((5, 6), device=device),
        "k_cache": torch.zeros((5, 2, 3, 8), device=device),
        "v_cache": torch.zeros((5, 2, 3, 4), device=device),
        "slots": torch.tensor([1, 2], device=device),
    }
    return {**given, **changes}


@given(
    sizes=st.tuples(st.integers(0, 20), st.integers(1, 5), st.integers(1, 4)),
    columns=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_bits(row_isa: str, device: torch.device, sizes, columns, dtype, flags, seed) -> None:
    """All bits but those of NaN, of any columns, on every instruction set; k is not written."""
    (tokens, heads, kv_heads), (before, pairs, behind) = sizes, columns
    interleaved, own_angles, is_float8, in_place = flags
    generator = torch.Generator().manual_seed(seed)
    dim = before + 2 * pairs + behind
    # Numbers of all sizes, subnormal ones and those that overflow, too.
    scale = torch.exp2(torch.randint(-150, 130, (tokens, 1, 1), generator=generator).float())
    rows = (torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator) * scale).to(dtype).to(device)
    angles = torch.randn(11, 2 * pairs, generator=generator).to(dtype if own_angles else torch.float32).to(device)
    positions = torch.randint(-2, 13, (tokens,), generator=generator)
    slots = torch.randperm(30, generator=generator)[:tokens] - 2
    cache_dtype = FP8 if is_float8 else dtype
    caches = torch.zeros(2, 7, 4, kv_heads, dim, device=device).to(cache_dtype)
    scales = {"k_scale": torch.tensor(0.3, device=device)} if is_float8 else {}

    q, k, v = rows.split([heads, kv_heads, kv_heads], dim=1)
    rotated_q, rotated_k = (
        loops.rotated(x.cpu(), positions.tolist(), angles.cpu(), interleaved, before).to(device) for x in (q, k)
    )
    expected = caches.clone()
    append_kv(rotated_k, v, *expected, slots.to(device), **scales)
    kept = rows.clone()
    out = rope_append(
        q, k, v, positions.to(device), angles, *caches, slots.to(device), interleaved=interleaved,
        rotary_start=before, q_out=q if in_place else None, **scales,
    )  # fmt: skip
    assert_same_bits(out, rotated_q)
    assert_same_bits(caches, expected)
    written = heads if in_place else 0
    assert torch.equal(raw(rows[:, written:].contiguous()), raw(kept[:, written:].contiguous()))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    found, expected = found.cpu(), expected.cpu()
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    assert torch.equal(found.contiguous().view(kind)[~nan], expected.contiguous().view(kind)[~nan])


def test_into_a_given_tensor(backend: str, device: torch.device) -> None:
    given = arguments(device, q=torch.randn((2, 4, 8), device=device))
    expected = rope_append(**given)
    wide = torch.full((2, 6, 20), 7.0, device=device)
    out = wide[:, 1:-1, 4:12]
    assert rope_append(**given, q_out=out) is out
    assert torch.equal(out, expected)
    wide[:, 1:-1, 4:12] = 7.0
    assert (wide == 7.0).all()


def test_two_pages_past_2_31(backend: str, device: torch.device) -> None:
    stride = 2**31 + 64
    storage = torch.empty(stride + 64, dtype=torch.bfloat16, device=device)
    cache = torch.as_strided(storage, (2, 2, 2, 4), (stride, 8, 4, 1))
    cache.zero_()
    q, k = torch.randn((2, 3, 2, 4), device=device).bfloat16()
    places = torch.tensor([0, 1, 1], device=device)
    near = torch.zeros((2, 2, 2, 4), dtype=torch.bfloat16, device=device)
    slots = torch.tensor([1, 2, 3], device=device)
    angles = torch.randn((2, 4), device=device)
    for k_cache in (cache, near):
        rope_append(q, k, None, places, angles, k_cache, None, slots)
    assert near[1].any() and torch.equal(cache, near)
