"""Weak to strong decays: products in fp32's range, beyond it, and total loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import int32
from support import recurrent as case
from support.recurrent import Layer, error, layer, paths_to, plain_dtype, trees_of  # noqa: F401

import pagedtree as pt
from pagedtree.reference import recurrent as loops

BOUNDS = {torch.float32: 2e-6, torch.float16: 2.5e-3}
STRENGTHS = [0.02, 1.0, 4.0, 60.0]

pytestmark = pytest.mark.usefixtures("on_device")


def decayed(rows: object, strength: float, **options: object) -> Layer:
    of = layer(rows, **{"channels": True, **options})  # type: ignore[arg-type]
    of.g.mul_(strength)
    if of.g.dim() == 3:
        of.g[:, :, 3] *= 5  # a channel that forgets first
    return of


@pytest.mark.each_value
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("with_beta", [True, False], ids=["delta", "no delta"])
def test_equals_loops(strength: float, with_beta: bool) -> None:
    bound = BOUNDS[case.PLAIN]
    trees = trees_of([40, 20], 3, reach=2)
    of, path = decayed(trees, strength, with_beta=with_beta), paths_to(trees, [39, 19], 40)
    assert error(of.run(), of.run(loops.tree_delta_rule)) <= bound
    assert error(of.advance(pt.advance_state, *path), of.advance(loops.advance_state, *path)) <= bound
    causal = decayed([70, 3], strength, with_beta=with_beta)
    assert error(causal.run(), causal.run(loops.tree_delta_rule)) <= bound
    assert error(causal.advance(), causal.advance(loops.advance_state)) <= bound


@pytest.mark.each_value
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize(("reach", "channels"), [(2, True), (6, True), (6, False)])
def test_tree_paths_match_the_causal_op(strength: float, reach: int, channels: bool) -> None:
    """Root-to-leaf paths equal the causal op bit for bit."""
    trees = trees_of([48], 11, reach=reach)
    of = decayed(trees, strength, channels=channels, slots=[1])
    out, parents = of.run(), trees.parents.tolist()
    for leaf in sorted(set(range(48)) - set(parents))[::3]:
        accept, accepted = paths_to(trees, [leaf], 48)
        path = accept[0, : int(accepted) + 1].long()
        chain = of.part(path, trees=None, options={"cu_seqlens": int32([0, len(path)])})
        assert torch.equal(chain.run(), out[path])
        assert torch.equal(chain.advance(), of.advance(pt.advance_state, accept, accepted))


@pytest.mark.parametrize("strength", STRENGTHS)
def test_not_worse_than_transformers(strength: float) -> None:
    """The error against float64 is at most 1.05 times its chunked form's in the same dtype."""
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    for dtype in {case.PLAIN, torch.bfloat16}:
        of = decayed([70], strength, dims=(32, 32), heads=(2, 2), dtype=dtype, slots=[0])
        rows, options = of.as_batch()
        theirs, state = module.chunk_kimi_delta_attention(*rows, **options)
        expected = of.run(loops.tree_delta_rule)
        assert error(of.advance()[:1], state.double()) <= 1e-4
        assert error(of.run(), expected) <= 1.05 * error(theirs[0], expected) + 1e-6


@pytest.mark.parametrize("channels", [False, True], ids=["head", "channel"])
def test_infinite_decay_erases_the_state(channels: bool) -> None:
    """A decay of -inf erases a huge state."""
    of = layer(trees_of([12, 3]), channels=channels)
    of.g[of.trees.cu_nodes[:-1].long()] = -math.inf  # type: ignore[union-attr]
    forgotten = replace(of, state=torch.full_like(of.state, 3e38))
    assert torch.equal(forgotten.run(), replace(of, state=torch.zeros_like(of.state)).run())
    path = paths_to(of.trees, [11, 2], 12)  # type: ignore[arg-type]
    assert forgotten.advance(pt.advance_state, *path)[of.state_index.long()].abs().max() < 100


def test_unspecified_decays_are_bounded() -> None:
    of = layer(trees_of([12, 3]))
    of.g[::3] = 200.0
    of.g[1::3] = math.nan
    assert of.run().isfinite().all()
