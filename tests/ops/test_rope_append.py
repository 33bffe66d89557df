"""rope_append beside plain loops in float32, bit for bit, and what it refuses; `check` has rows of other shapes."""

from __future__ import annotations

from typing import Any

import pytest
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


def test_refuses(backend: str, device: torch.device) -> None:
    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    fp8 = ones(5, 2, 3, 8).to(FP8)
    for change, message in [
        (
            {"q": ones(2, 4, 8).double()},
            "`q` must be of dtype torch.float32 or torch.float16 or torch.bfloat16, got torch.float64",
        ),
        (
            {"q": ones(2, 4, 8).to(FP8)},
            "`q` must be of dtype torch.float32 or torch.float16 or torch.bfloat16, got torch.float8_e4m3fn",
        ),
        ({"q": ones(2, 32)}, r"`q` must be of shape \[\*, \*, \*\] .*, got \[2, 32\]"),
        ({"q": ones(2, 8, 4).mT}, "`q` must be contiguous in its last dimension"),
        ({"k": ones(2, 3, 8).half()}, "`k` must be of dtype torch.float32, got torch.float16"),
        ({"k": ones(3, 3, 8)}, r"`k` must be of shape \[2, \*, 8\] .*, got \[3, 3, 8\]"),
        ({"k": ones(2, 3, 6)}, r"`k` must be of shape \[2, \*, 8\] .*, got \[2, 3, 6\]"),
        ({"v": ones(2, 3, 4).half()}, "`v` must be of dtype torch.float32, got torch.float16"),
        ({"v": None}, "`v` must be a Tensor where `v_cache` is one, got None"),
        ({"v_cache": None}, "`v_cache` must be a Tensor where `v` is one, got None"),
        ({"positions": torch.tensor([0], device=device)}, r"`positions` must be of shape \[2\] .*, got \[1\]"),
        ({"positions": ones(2).int()}, "`positions` must be of dtype torch.int64, got torch.int32"),
        ({"cos_sin": ones(5, 6).half()}, "`cos_sin` must be of dtype torch.float32, got torch.float16"),
        ({"cos_sin": ones(6)}, r"`cos_sin` must be of shape \[\*, \*\] .*, got \[6\]"),
        ({"cos_sin": ones(6, 5).mT}, "`cos_sin` must be contiguous in its last dimension"),
        ({"cos_sin": ones(0, 6)}, r"`cos_sin` must be of at least one row, got \[0, 6\]"),
        ({"cos_sin": ones(5, 5)}, r"`cos_sin` must be of an even number of columns, got \[5, 5\]"),
        ({"cos_sin": ones(5, 10)}, r"`cos_sin` must be of at most 8 columns, the head size, got \[5, 10\]"),
        ({"rotary_start": 3}, r"`rotary_start` must be in 0..2, so that the 6 columns are within a head, got 3"),
        ({"rotary_start": -1}, r"`rotary_start` must be in 0..2, so that the 6 columns are within a head, got -1"),
        ({"k_cache": fp8}, "`v_cache` must be of dtype torch.float8_e4m3fn, got torch.float32"),
        ({"k_cache": ones(5, 2, 3, 4)}, r"`k_cache` must be of shape \[\*, \*, 3, 8\] .*, got \[5, 2, 3, 4\]"),
        ({"slots": torch.tensor([1], device=device)}, r"`slots` must be of shape \[2\] .*, got \[1\]"),
        ({"k_scale": ones(1)}, "`k_scale` must be absent where the rows are copied as they are"),
        ({"q_out": ones(2, 4, 6)}, r"`q_out` must be of shape \[2, 4, 8\] .*, got \[2, 4, 6\]"),
        ({"q_out": ones(2, 4, 8).half()}, "`q_out` must be of dtype torch.float32, got torch.float16"),
        ({"q_out": ones(2, 8, 4).mT}, "`q_out` must be contiguous in its last dimension"),
    ]:
        bad = arguments(device, **change)
        before = [t.clone() for t in (bad["k_cache"], bad.get("v_cache"), bad.get("q_out")) if t is not None]
        with pytest.raises(ValueError, match=f"rope_append: {message}"):
            rope_append(**bad)
        after = [t for t in (bad["k_cache"], bad.get("v_cache"), bad.get("q_out")) if t is not None]
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(after, before, strict=True))


def test_value_checks(value_checks: None, device: torch.device) -> None:
    for position in (-1, 5, 2**62):
        bad = arguments(device, positions=torch.tensor([0, position], device=device))
        with pytest.raises(ValueError, match=rf"rope_append: `positions\[1\]` must be in 0..4, got {position}"):
            rope_append(**bad)
        assert not bad["k_cache"].any()
    bad = arguments(device, slots=torch.tensor([10, -1], device=device))
    with pytest.raises(ValueError, match=r"rope_append: `slots\[0\]` must be in -1..9, got 10"):
        rope_append(**bad)
    rope_append(**arguments(device, slots=torch.tensor([9, -1], device=device)))
