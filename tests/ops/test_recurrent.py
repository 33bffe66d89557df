"""The gated delta rule and short convolution on trees equal loops with one state per node."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import int32, seeded
from support import recurrent as case
from support.recurrent import Layer, error, layer, paths_to, plain_dtype, trees_of  # noqa: F401
from torch import Tensor

import pagedtree as pt
from pagedtree import _C, build_trees
from pagedtree.reference import recurrent as loops

BOUNDS = {torch.float32: 1e-4, torch.float16: 2.5e-3, torch.bfloat16: 1e-2}


ISAS = [isa for isa in _C.available_isas() if not isa.startswith("amx")]

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(params=[*ISAS, "kernels"])
def variant(request: pytest.FixtureRequest, backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each CPU instruction set, then other backends' kernels."""
    if (backend == "cpu") == (request.param == "kernels"):
        pytest.skip("instruction sets are the cpu backend's")
    if backend == "cpu":
        monkeypatch.setenv("PAGEDTREE_CPU_ISA", request.param)
    return request.param


def expect(of: Layer, *path: Tensor) -> None:
    bound = BOUNDS[of.v.dtype]
    before = of.state.clone()
    out = of.run()
    assert out.dtype == of.v.dtype and error(out, of.run(loops.tree_delta_rule)) <= bound
    assert torch.equal(of.state, before)
    assert torch.equal(out, of.run())
    expected = of.advance(loops.advance_state, *path)
    found = of.advance(pt.advance_state, *path)
    assert error(found, expected) <= bound
    untouched = (expected == of.state.double()).flatten(1).all(1)
    assert torch.equal(found[untouched], of.state[untouched])


@pytest.mark.parametrize("channels", [False, True], ids=["head", "channel"])
def test_invariance(channels: bool) -> None:
    """A node's bits are independent of its batch and descendants."""
    trees = trees_of([30, 17, 4], 6)
    of = layer(trees, channels=channels, dtype=torch.bfloat16)
    out = of.run()
    for b in range(3):
        begin, end = trees.cu_nodes[b : b + 2].tolist()
        for size in {1, (end - begin) // 2 + 1, end - begin}:
            part = slice(begin, begin + size)
            few = build_trees(trees.parents[part].clone(), int32([0, size]), max_nodes=256, max_depth=255)
            alone = of.part(part, trees=few, state_index=of.state_index[b : b + 1])
            assert torch.equal(alone.run(), out[part])


BAD_PATHS = {
    "no tree": ([-1, -1, -1, -1], 0),
    "not the root": ([1, 2, -1, -1], 1),
    "not a child": ([0, 3, -1, -1], 1),
    "out of the tree": ([0, 99, -1, -1], 1),
    "below zero": ([0, -5, -1, -1], 1),
    "descends": ([0, 1, 0, -1], 2),
    "too long": ([0, 1, 2, 3], 4),
    "negative": ([0, 1, 2, 3], -1),
}


@pytest.mark.parametrize("name", BAD_PATHS)
def test_bad_paths_write_nothing(name: str) -> None:
    trees = build_trees(int32([-1, 0, 1, 2, -1, 0]), int32([0, 4, 6]), max_nodes=4, max_depth=3)
    nodes, accepted = BAD_PATHS[name]
    path = (int32([nodes, [0, 1, -1, -1]]), int32([accepted, 1]))
    of = layer(trees, slots=[0, 1])
    found = of.advance(pt.advance_state, *path)
    assert torch.equal(found[0], of.state[0]) and not torch.equal(found[1], of.state[1])
    assert error(found, of.advance(loops.advance_state, *path)) <= BOUNDS[case.PLAIN]
    conv_state, x = torch.randn(3, 20, 3).to(case.PLAIN), torch.randn(6, 20).to(case.PLAIN)
    before = conv_state.clone()
    pt.advance_conv(conv_state, int32([0, 1]), x, trees, *path)
    assert torch.equal(conv_state[0], before[0]) and torch.equal(conv_state[1, :, 1:], x[4:6].T)


@pytest.mark.parametrize("channels", [False, True], ids=["head", "channel"])
def test_eps_of_norms(variant: str, channels: bool) -> None:
    """Near the default 1e-6, sums of squares make norms depend on eps."""
    trees = trees_of([9, 4])
    for rows, path in ((trees, paths_to(trees, [7, 3], 9)), ([70], ())):
        of = layer(rows, channels=channels, l2norm=True)
        of.q.mul_(2e-4), of.k.mul_(2e-4)
        for options in ({}, {"l2norm_eps": 1e-4}):
            expect(replace(of, options={**of.options, **options}), *path)


@pytest.mark.parametrize("l2norm", [False, True])
def test_transformers_gated_delta_rule(l2norm: bool) -> None:
    """The error against float64 is at most 1.05 times the chunked form's of transformers in the same dtype."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    for dtype, bound in BOUNDS.items():
        if dtype == torch.float32 != case.PLAIN:
            continue
        of = layer([70], dims=(64, 64), heads=(2, 4), dtype=dtype, l2norm=l2norm, slots=[0])
        (q, k, *rest), options = of.as_batch()
        q, k = (x.repeat_interleave(2, 2) for x in (q, k))
        theirs, state = module.torch_chunk_gated_delta_rule(q, k, *rest, use_qk_l2norm_in_kernel=l2norm, **options)
        expected = of.run(loops.tree_delta_rule)
        assert error(theirs[0], expected) <= bound  # loops equal transformers
        assert error(of.run(), expected) <= 1.05 * error(theirs[0], expected) + 1e-6
        assert error(of.advance()[:1], state.double()) <= 1e-4


def test_transformers_mamba2() -> None:
    """q = C, k = B, v = dt x, g = dt A, no delta; the state is [H, Dv, Dk]."""
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    generator = seeded(3)
    x, dt = torch.randn(100, 4, 16, generator=generator), torch.rand(100, 4, generator=generator)
    b, c = torch.randn(2, 100, 2, 32, generator=generator)
    decay, state = -torch.rand(4, generator=generator), torch.randn(1, 4, 16, 32, generator=generator)
    theirs, final = module.mamba2_chunk_scan(
        x[None], dt[None], decay, b[None], c[None], 64, initial_states=state, return_final_states=True
    )
    rows = (b.to(case.PLAIN), (dt[..., None] * x).to(case.PLAIN), dt * decay, None)
    slot, cut, states = int32([0]), int32([0, 100]), state.transpose(2, 3)
    out = pt.tree_delta_rule(c.to(case.PLAIN), *rows, states, slot, None, cu_seqlens=cut, scale=1.0)
    pt.advance_state(states, slot, *rows, None, cu_seqlens=cut)
    assert error(out, theirs[0].double()) <= BOUNDS[case.PLAIN] and error(state, final.double()) <= BOUNDS[case.PLAIN]


def test_torch_conv1d() -> None:
    """transformers: padding on the left, convolution, silu."""
    x, weight, bias = torch.randn(50, 24).to(case.PLAIN), torch.randn(24, 4), torch.randn(24)
    padded = torch.nn.functional.pad(x.double().T[None], (3, 0))
    expected = torch.nn.functional.conv1d(padded, weight.double()[:, None], bias.double(), groups=24)[0].T
    state, rows = (torch.zeros(1, 24, 3).to(case.PLAIN), int32([0])), int32([0, 50])
    out = pt.tree_conv1d(x, weight, bias, *state, None, cu_seqlens=rows, activation="silu")
    assert error(out, torch.nn.functional.silu(expected)) <= BOUNDS[case.PLAIN]


def test_float32_is_for_the_cpu() -> None:
    of = layer(trees_of([3, 4]), dtype=torch.float32)
    if torch.float32 == case.PLAIN:
        assert of.run().dtype == torch.float32
    else:
        with pytest.raises(ValueError, match=r"tree_delta_rule: q: expected dtype .*bfloat16, got torch\.float32"):
            of.run()
