"""Sizes and strides select CUDA kernels without effect on results."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import int32
from support.recurrent import Layer, error, layer, paths_to, plain_dtype, trees_of  # noqa: F401

from pagedtree import advance_state, build_trees
from pagedtree.reference import recurrent as loops

pytestmark = pytest.mark.usefixtures("on_device")

SIZES = (64, 1, 0, 33, 16, 8, 17, 48, 9)


def without_words(of: Layer) -> Layer:
    """Moves states off 16-byte alignment."""
    shape = of.state.shape
    state = torch.zeros(*shape[:3], shape[3] + 1)[..., 1:]
    state.copy_(of.state)
    return replace(of, state=state)


def of_larger_trees(of: Layer) -> Layer:
    assert of.trees is not None
    trees = of.trees
    return replace(of, trees=build_trees(trees.parents, trees.cu_nodes, max_nodes=256, max_depth=255))


@pytest.mark.each_value
@pytest.mark.parametrize("dims", [(128, 128), (72, 40), (24, 8), (128, 160)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_and_strides_do_not_matter(dims: tuple[int, int], transposed: bool) -> None:
    for sizes, channels in ((SIZES, False), ((16, 9), False), ((5, 16), False), ((8, 12), True), ((40, 5, 19), True)):
        trees, l2norm, with_beta = trees_of(list(sizes), 5, padding=3), dims[0] == 128, sizes != (5, 16)
        options = {"channels": channels, "l2norm": l2norm, "with_beta": with_beta}
        of = layer(trees, dims=dims, heads=(1, 2), transposed=transposed, **options)  # type: ignore[arg-type]
        out = of.run()
        assert error(out, of.run(loops.tree_delta_rule)) <= 2.5e-3 and not out[sum(sizes) :].any()
        assert torch.equal(without_words(of).run(), out)
        assert torch.equal(of_larger_trees(of).run(), out)


@pytest.mark.each_value
@pytest.mark.parametrize("dims", [(128, 128), (72, 40), (128, 72)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_beta", [True, False])
@pytest.mark.parametrize("channels", [False, True], ids=["head", "channel"])
def test_lengths_and_strides_of_paths_do_not_matter(
    dims: tuple[int, int], transposed: bool, with_beta: bool, channels: bool
) -> None:
    trees = trees_of([40, 3, 9, 9, 0, 4], 5, reach=1)
    options = {"transposed": transposed, "with_beta": with_beta, "channels": channels, "l2norm": dims[0] == 72}
    of = layer(trees, dims=dims, heads=(1, 2), **options)  # type: ignore[arg-type]
    leaves = [37, 0, 7, 8, -1, 3]
    found = of.advance(advance_state, *paths_to(trees, leaves, 38))
    assert error(found, of.advance(loops.advance_state, *paths_to(trees, leaves, 38))) <= 2.5e-3
    assert torch.equal(of.advance(advance_state, *paths_to(trees, leaves, 65)), found)
    assert torch.equal(without_words(of).advance(advance_state, *paths_to(trees, leaves, 38)), found)


@pytest.mark.parametrize(("with_beta", "channels"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("what", ["v", "k", "q"])
def test_infinities_stay_on_their_paths(what: str, with_beta: bool, channels: bool) -> None:
    """Infinities of much earlier tokens, summed by blocks, stay too."""
    of = layer(trees_of([64, 20], 4, reach=12), with_beta=with_beta, channels=channels)
    out = of.run()
    getattr(of, what)[3, :, 5] = math.inf
    found, below = of.run(), of.trees.mask[:, 0] & (1 << 3) != 0  # type: ignore[union-attr]
    below[64:] = False
    assert 2 < below.sum() < 60
    rows = found.isfinite().all(2).all(1).logical_not()
    assert (rows <= below).all() and rows[3]
    assert torch.equal(found[~below], out[~below])
    large = of_larger_trees(of).run()
    assert torch.equal(found.isnan(), large.isnan()) and torch.equal(found.nan_to_num(), large.nan_to_num())


def test_rows_may_lie_anywhere() -> None:
    """Keys, queries and values may be aligned to single elements."""
    of = layer(trees_of([20, 40], 8), dims=(64, 32))
    out = of.run()
    moved = {}
    for name in ("q", "k", "v"):
        t = getattr(of, name)
        wide = torch.zeros(t.shape[0], t.shape[1] * t.shape[2] + 3, dtype=t.dtype)
        moved[name] = wide[:, 1:-2].unflatten(1, t.shape[1:])
        moved[name].copy_(t)
    assert torch.equal(replace(of, **moved).run(), out)


def test_rows_outside_trees_are_zeroed() -> None:
    """Rows outside trees are zeroed, whatever memory held."""
    trees = build_trees(int32([7, 7, -1, 0, 0, -1, 0, 5, 9, 9]), int32([2, 5, 8]), max_nodes=2, max_depth=1)
    of = layer(trees, dims=(32, 72))
    for _ in range(3):
        filled = torch.full((10, 4, 72), math.nan, dtype=of.v.dtype)
        del filled
        out = of.run()
        reachable = trees.depths >= 0
        assert out[reachable].any(2).all() and not out[~reachable].any()
