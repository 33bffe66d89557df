"""select_nodes: the rows of a whole batch of trees that are most likely to be accepted."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from draft_checks import seeded
from hypothesis import given
from hypothesis import strategies as st
from step_case import int32
from torch import Tensor

from pagedtree import DraftTree, TreeBatch, best_first_tree, build_trees, select_nodes
from pagedtree.reference import drafting as loops

pytestmark = pytest.mark.usefixtures("on_device")

FIELDS = ("depths", "first_child", "next_sibling", "mask")


def batch_of(sizes: list[int], generator: torch.Generator, reach: int = 9, padding: int = 0) -> TreeBatch:
    """Random trees; a node's parent is one of the `reach` nodes before it."""
    parents = []
    for size in sizes:
        for i in range(size):
            low = max(0, i - reach)
            parents.append(int(torch.randint(low, i, (), generator=generator)) if i else -1)
    cu_nodes = int32([0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()])
    most = max([*sizes, 1])
    return build_trees(int32(parents + [-1] * padding), cu_nodes, max_nodes=most, max_depth=most - 1)


def expect_selection(trees: TreeBatch, survival: Tensor, budget: int, limit: Tensor | None = None) -> TreeBatch:
    """Compares with plain loops; every field of the batch follows from the parents."""
    kept, node_map = select_nodes(trees, survival, budget, limit=limit)
    most = budget if limit is None else min(int(limit), budget)
    expected = loops.select_nodes(
        trees.cu_nodes.tolist(), trees.parents.tolist(), trees.depths.tolist(), survival.tolist(), most,
        trees.max_nodes, trees.max_depth,
    )  # fmt: skip
    capacity = max(budget, trees.batch_size)
    padding = [-1] * (capacity - len(expected.rows))
    assert node_map.dtype == torch.int32 and node_map.tolist() == expected.rows + padding
    kept._check()
    assert kept.parents.tolist() == [parent for tree in expected.parents for parent in tree] + padding
    assert kept.cu_nodes.diff().tolist() == [len(tree) for tree in expected.parents] and int(kept.cu_nodes[0]) == 0
    assert (kept.max_nodes, kept.max_depth) == (trees.max_nodes, trees.max_depth)
    linked = build_trees(kept.parents, kept.cu_nodes, max_nodes=kept.max_nodes, max_depth=kept.max_depth)
    for name in FIELDS:
        assert torch.equal(getattr(kept, name), getattr(linked, name)), name
    assert torch.equal(kept.valid, trees.valid)
    assert int((kept.depths >= 0).sum()) == len(expected.rows)  # no orphan
    return kept


@pytest.mark.parametrize("ctas", [1, 2, 16])
def test_clusters_do_not_matter(backend: str, monkeypatch: pytest.MonkeyPatch, ctas: int) -> None:
    """A GPU without clusters gives one CTA all trees."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", f"132:227:{ctas}")
    generator = seeded(8)
    trees = batch_of([i % 9 for i in range(300)], generator, 4, padding=2)
    survival = (torch.rand(len(trees.parents), generator=generator) * 8).floor() / 8
    expect_selection(trees, survival, 500)
    expect_selection(trees, survival, 900, int32([400]))


def test_a_small_batch(backend: str) -> None:
    trees = TreeBatch.from_trees([DraftTree.full([2, 1]), DraftTree.chain(2)], device=torch.get_default_device())
    #                        root  1    2    3 (of 1) 4 (of 2)  root 1    2
    survival = torch.tensor([1.0, 0.2, 0.7, 0.9, 0.6, 1.0, 0.5, 0.9])
    kept, node_map = select_nodes(trees, survival, 6)
    assert node_map.tolist() == [0, 2, 4, 5, 6, 7]  # node 3 counts 0.2 and node 7 counts 0.5, as their parents do
    assert kept.cu_nodes.tolist() == [0, 3, 6]
    assert kept.parents.tolist() == [-1, 0, 1, -1, 0, 1] and kept.depths.tolist() == [0, 1, 2, 0, 1, 2]
    kept, node_map = select_nodes(trees, survival, 6, limit=int32([3]))
    assert node_map.tolist() == [0, 2, 5, -1, -1, -1] and kept.cu_nodes.tolist() == [0, 2, 3]
    assert kept.depths.tolist() == [0, 1, 0, -1, -1, -1] and kept.mask.flatten().tolist() == [1, 3, 1, 0, 0, 0]


def test_unreachable_rows_are_not_kept(backend: str) -> None:
    """The rows at the end of a shorter best-first tree, and malformed trees; `valid` still tells which those were."""
    log_probs = torch.tensor([[[-1.0, -math.inf]], [[-1.0, -2.0]]])
    draft_tokens, trees = best_first_tree(log_probs, torch.tensor([[[8, 9]], [[6, 7]]]), torch.tensor([3, 4]), 4)
    kept = expect_selection(trees, torch.ones(8), 8)
    _, node_map = select_nodes(trees, torch.ones(8), 8)
    assert node_map.tolist() == [0, 1, 4, 5, 6, -1, -1, -1] and kept.valid.tolist() == [True, True]
    assert draft_tokens[node_map[:5].long()].tolist() == [3, 8, 4, 6, 7]
    malformed = build_trees(int32([-1, 0, 5, 2, 1, 3, 0, -1, 0, 1, 0]), int32([0, 2, 7, 11]), max_nodes=4, max_depth=1)
    kept = expect_selection(malformed, torch.ones(11), 9)
    assert kept.valid.tolist() == [True, False, False]


@given(st.integers(0, 2**31), st.booleans())
def test_garbage_links(backend: str, seed: int, with_offsets: bool) -> None:
    """Whatever links, depths and offsets say, the result is a batch of trees within its rows."""
    generator = seeded(seed)

    def draw(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator).to(torch.int32)

    trees = batch_of([9, 14, 1, 8], generator)
    parents = torch.where(draw(0, 3, 32) == 0, draw(-4, 20, 32), trees.parents)
    trees = build_trees(parents, trees.cu_nodes, max_nodes=11, max_depth=4)
    trees.depths[:] = torch.where(draw(0, 9, 32) == 0, draw(-2, 7, 32), trees.depths)
    survival = draw(0, 5, 32).float()
    if not with_offsets:
        expect_selection(trees, survival, 17, draw(-5, 30, 1))
        return
    trees.cu_nodes[:] = draw(-9, 50, 5)
    kept, node_map = select_nodes(trees, survival, 17)
    offsets = kept.cu_nodes.tolist()
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= 17
    assert all(0 <= row < 32 for row in node_map[: offsets[-1]].tolist())
    assert node_map[offsets[-1] :].tolist() == [-1] * (17 - offsets[-1])
    linked = build_trees(kept.parents, kept.cu_nodes, max_nodes=11, max_depth=10)
    assert int((linked.depths >= 0).sum()) == offsets[-1]
    assert torch.equal(kept.mask, linked.mask) and torch.equal(kept.next_sibling, linked.next_sibling)


def test_selected_trees_verify_like_trees_of_their_own(backend: str) -> None:
    """What is kept is a batch like any other: narrow, copy_ and tree() take it."""
    trees = batch_of([9, 0, 12], seeded(6))
    kept, node_map = select_nodes(trees, torch.rand(21, generator=seeded(7)), 12)
    for b, (begin, end) in enumerate(pairwise(kept.cu_nodes.tolist())):
        if begin < end:
            tree = kept.tree(b)
            assert tree.depths.tolist() == trees.depths[node_map[begin:end].long()].tolist()
    part = kept.narrow(2, 1)
    assert part.batch_size == 1 and part.parents.tolist() == kept.parents[int(kept.cu_nodes[2]) :].tolist()
    fixed = batch_of([9, 0, 12], seeded(6))
    assert torch.equal(fixed.copy_(kept).parents[:12], kept.parents)
