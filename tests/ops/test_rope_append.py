"""rope_append of any columns, to a given tensor, to distant pages; `check` has other shapes."""

from __future__ import annotations

import calls
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedtree import rope_append
from pagedtree.check.case import Place
from pagedtree.check.cases.inputs import LAYOUTS
from pagedtree.check.cases.rope import Rope, rope_case


@given(
    sizes=st.tuples(st.integers(0, 20), st.integers(1, 5), st.integers(1, 4)),
    columns=st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40)),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    layout=st.sampled_from([*LAYOUTS, "latent"]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_bits(row_isa: str, device: torch.device, sizes, columns, dtype, layout, flags) -> None:
    (tokens, heads, kv_heads), (before, pairs, behind) = sizes, columns
    interleaved, own_angles, is_float8, in_place = flags
    angles, (cache, scale) = dtype if own_angles else "fp32", ("fp8", "head") if is_float8 else (dtype, "no")
    form = (before + 2 * pairs + behind, 2 * pairs, before, interleaved, layout)
    case = rope_case(Rope(dtype, cache, angles, *form, tokens, heads, kv_heads, scale, in_place))
    assert case.loops is not None and case.difference(case.run(Place(device, "cpu")), case.loops()) == ""


def test_into_a_given_tensor(backend: str, device: torch.device) -> None:
    arguments = calls.make("rope_append").on_memory(lambda memory: memory.to(device)).arguments
    wide = torch.full((5, 6, 28), 7.0, dtype=torch.bfloat16, device=device)
    out, expected = wide[:, 1:-1, 4:20], rope_append(**{**arguments, "q_out": None})
    assert rope_append(**{**arguments, "q_out": out}) is out
    assert torch.equal(out, expected)
    wide[:, 1:-1, 4:20] = 7.0
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
