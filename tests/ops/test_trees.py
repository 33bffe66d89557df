"""DraftTree, TreeBatch and build_trees equal plain loops."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import int32
from torch import Tensor

from pagedtree import DraftTree, TreeBatch, build_trees, medusa_propose
from pagedtree.reference import tree as loops


@st.composite
def tree_parents(draw: st.DrawFn, max_nodes: int = 70) -> list[int]:
    """Draws a well-formed tree, up to a third mask word."""
    n = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]


# DraftTree ------------------------------------------------------------------------------------------------------------


@given(tree_parents())
def test_draft_tree(parents: list[int]) -> None:
    tree = DraftTree.from_parents(parents)
    n = len(parents)
    rows, _ = loops.link(parents, n, n)
    assert tree.num_nodes == n
    assert tree.parents.tolist() == parents
    assert tree.max_depth == max(row.depth for row in rows)
    for name in ("depth", "first_child", "next_sibling"):
        assert getattr(tree, {"depth": "depths"}.get(name, name)).tolist() == [getattr(row, name) for row in rows]
    assert tree.mask.dtype == bool and tree.mask.shape == (n, n)
    assert [frozenset(np.flatnonzero(row).tolist()) for row in tree.mask] == [row.visible for row in rows]
    for node in range(n):
        children = [child for child in range(1, n) if parents[child] == node]
        assert [tree.child_ranks[child] for child in children] == list(range(len(children)))
    assert tree.child_ranks[0] == -1
    for array in (tree.parents, tree.depths, tree.first_child, tree.next_sibling, tree.child_ranks):
        assert array.dtype == np.int32 and array.shape == (n,)


@given(tree_parents(), st.randoms(use_true_random=False))
def test_from_paths_inverts_child_ranks(parents: list[int], random) -> None:
    tree = DraftTree.from_parents(parents)
    ranks = tree.child_ranks
    path_of: dict[int, list[int]] = {0: []}
    for node in range(1, tree.num_nodes):
        path_of[node] = path_of[parents[node]] + [int(ranks[node])]
    paths = [path_of[node] for node in range(1, tree.num_nodes)]
    random.shuffle(paths)
    rebuilt = DraftTree.from_paths(paths)
    order = sorted(range(tree.num_nodes), key=lambda node: (len(path_of[node]), path_of[node]))
    new_index = {old: new for new, old in enumerate(order)}
    assert rebuilt.parents.tolist() == [-1 if old == 0 else new_index[parents[old]] for old in order]
    assert rebuilt.max_depth == tree.max_depth


def test_from_paths_examples() -> None:
    assert DraftTree.from_paths([[0], [1], [0, 0]]).parents.tolist() == [-1, 0, 0, 1]
    assert DraftTree.from_paths([]).parents.tolist() == [-1]
    with_gaps = DraftTree.from_paths([[7], [2], [7, 5]])
    assert with_gaps.parents.tolist() == [-1, 0, 0, 2] and with_gaps.child_ranks.tolist() == [-1, 2, 7, 5]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("paths", [[0, 0]], "every prefix"),
        ("paths", [[0], [0, 1, 2]], "every prefix"),
        ("paths", [[0], [0]], "each path once"),
        ("paths", [[]], "at least one rank"),
        ("paths", [[0], [-1]], "ranks >= 0"),
        ("paths", [[2**31]], "below 2\\^31"),
        ("paths", [[i] for i in range(1024)], "1 to 1024 nodes"),
        ("parents", [], "1 to 1024 nodes"),
        ("parents", [[-1, 0]], "one dimension"),
        ("parents", [-1] + [0] * 1024, "1 to 1024 nodes"),
        ("parents", [0], r"parents\[0\] == -1"),
        ("parents", [-2, 0], r"parents\[0\] == -1"),
        ("parents", [-1, -1], r"got parents\[1\] == -1"),
        ("parents", [-1, 1], r"got parents\[1\] == 1"),
        ("parents", [-1, 0, 3, 0], r"got parents\[2\] == 3"),
        ("parents", [-1, 2**40], r"got parents\[1\] == 1099511627776"),
    ],
)
def test_paths_and_parents_are_refused(name: str, given: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(DraftTree, f"from_{name}")(given)


def test_chain_and_full() -> None:
    chain = DraftTree.chain(5)
    assert chain.num_nodes == 6 and chain.max_depth == 5
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3, 4]
    assert np.array_equal(chain.mask, np.tri(6, dtype=bool))
    assert DraftTree.chain(0).num_nodes == 1
    assert DraftTree.chain(1023).max_depth == 1023
    assert DraftTree.full([2, 1]).parents.tolist() == [-1, 0, 0, 1, 2]
    assert DraftTree.full([4, 2, 1]).num_nodes == 1 + 4 + 8 + 8
    assert DraftTree.full([]).num_nodes == DraftTree.full([0, 3]).num_nodes == 1
    assert DraftTree.full([1023]).num_nodes == 1024
    with pytest.raises(ValueError, match="num_draft_tokens"):
        DraftTree.chain(-1)
    with pytest.raises(ValueError, match="num_draft_tokens: expected 0 to 1023, got 1024"):
        DraftTree.chain(1024)
    with pytest.raises(ValueError, match="widths >= 0"):
        DraftTree.full([2, -1])
    with pytest.raises(ValueError, match="at most 1024"):
        DraftTree.full([1000, 1000, 1000])


# build_trees ----------------------------------------------------------------------------------------------------------


def check_batch(batch: TreeBatch, trees: list[list[int]]) -> None:
    """Compares a whole batch, padding included, with plain loops."""
    linked = [loops.link(parents, batch.max_nodes, batch.max_depth) for parents in trees]
    rows = [row for tree in linked for row in tree.rows]
    # zip needs at least one row.
    depths, first_child, next_sibling, visible = zip(
        *rows, *[loops.PADDING] * (len(batch.parents) - len(rows)), loops.PADDING, strict=True
    )
    assert batch.depths.tolist() == [*depths[:-1]]
    assert batch.first_child.tolist() == [*first_child[:-1]] and batch.next_sibling.tolist() == [*next_sibling[:-1]]
    assert batch.mask.cpu().equal(loops.words_of(visible[:-1], -(-batch.max_nodes // 32)))
    assert batch.valid.tolist() == [tree.valid for tree in linked]


@pytest.mark.each_value
@pytest.mark.parametrize("reach", [2, 40, 1024])
@pytest.mark.parametrize("max_depth", [1023, 200, 5])
def test_large_trees(backend, device, reach: int, max_depth: int) -> None:
    """Paths cross all mask words; nearer parents lengthen them."""
    draw = random.Random(reach)
    trees = [[-1] + [draw.randrange(max(i - reach, 0), i) for i in range(1, size)] for size in (1024, 33, 700)]
    for node in (150, 690):
        trees[2][node] = node + 1  # unreachable from here down
    offsets = np.cumsum([0, *map(len, trees)]).astype(np.int32)
    batch = build_trees(
        int32([parent for tree in trees for parent in tree], device),
        torch.from_numpy(offsets).to(device),
        max_nodes=1024,
        max_depth=max_depth,
    )
    check_batch(batch, trees)


@given(st.lists(tree_parents(), max_size=4))
def test_from_trees(backend, device, parents: list[list[int]]) -> None:
    trees = [DraftTree(p) for p in parents]
    batch = TreeBatch.from_trees(trees, device=device)
    check_batch(batch, parents)
    assert batch.valid.all()
    assert batch.batch_size == len(trees) and batch.device.type == device.type
    assert batch.parents.shape[0] == sum(t.num_nodes for t in trees)
    assert batch.max_nodes == max((t.num_nodes for t in trees), default=1)
    assert batch.max_depth == max((t.max_depth for t in trees), default=0)
    assert [batch.tree(b).parents.tolist() for b in range(len(trees))] == parents


# TreeBatch of fixed shape ---------------------------------------------------------------------------------------------


def tensors_of(batch: TreeBatch) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


@given(
    before=st.lists(tree_parents(20), min_size=2, max_size=2),
    after=st.lists(tree_parents(20), min_size=2, max_size=2),
    spare=st.integers(0, 5),
)
def test_copy_keeps_shapes_and_addresses(backend, device, before, after, spare) -> None:
    bounds = {"max_nodes": 20, "max_depth": 19}
    batch = TreeBatch.from_trees([DraftTree(p) for p in before], capacity=40 + spare, device=device, **bounds)
    addresses = {name: t.data_ptr() for name, t in tensors_of(batch).items()}
    shapes = {name: t.shape for name, t in tensors_of(batch).items()}
    check_batch(batch, before)
    other = TreeBatch.from_trees([DraftTree(p) for p in after], device=device, **bounds)
    assert batch.copy_(other) is batch
    check_batch(batch, after)
    assert addresses == {name: t.data_ptr() for name, t in tensors_of(batch).items()}
    assert shapes == {name: t.shape for name, t in tensors_of(batch).items()}
    direct = TreeBatch.from_trees([DraftTree(p) for p in after], capacity=40 + spare, device=device, **bounds)
    for name, expected in tensors_of(direct).items():
        assert torch.equal(getattr(batch, name), expected), name


def test_copy_refuses_other_shapes() -> None:
    one, two = DraftTree.chain(1), DraftTree.chain(2)
    batch = TreeBatch.from_trees([one])
    unchanged = {name: t.clone() for name, t in tensors_of(batch).items()}
    for other, message in [
        (TreeBatch.from_trees([one, one]), "batch_size = 1"),
        (TreeBatch.from_trees([two]), "max_nodes <= 2"),
        (TreeBatch.from_trees([one], max_depth=2), "max_depth <= 1"),
        (TreeBatch.from_trees([one], capacity=9), "at most 2 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            batch.copy_(other)
    for name, t in tensors_of(batch).items():
        assert torch.equal(t, unchanged[name])


def assert_same_batches(batch: TreeBatch, expected: TreeBatch) -> None:
    assert (batch.max_nodes, batch.max_depth) == (expected.max_nodes, expected.max_depth)
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(getattr(batch, name), tensor), name


@given(parts=st.lists(st.lists(tree_parents(40), max_size=3), min_size=1, max_size=4), spare=st.integers(0, 3))
@example(parts=[[[-1]], [[-1] + [0] * 69]], spare=0)  # masks of one word and of three
@example(parts=[[], []], spare=2)
def test_concatenate_as_if_made_at_once(backend, device, parts, spare) -> None:
    trees = [[DraftTree(parents) for parents in part] for part in parts]
    sizes = [sum(tree.num_nodes for tree in part) for part in trees]
    batches = [
        TreeBatch.from_trees(part, capacity=size + (spare if i == len(parts) - 1 else 0), device=device)
        for i, (part, size) in enumerate(zip(trees, sizes, strict=True))
    ]
    expected = TreeBatch.from_trees(
        [tree for part in trees for tree in part],
        max_nodes=max(batch.max_nodes for batch in batches),
        capacity=sum(sizes) + spare,
        device=device,
    )
    assert_same_batches(TreeBatch.concatenate(batches), expected)


def test_concatenate_refuses() -> None:
    batch = TreeBatch.from_trees([DraftTree.chain(1)])
    padded = TreeBatch.from_trees([DraftTree.chain(1)], capacity=3)
    assert_same_batches(TreeBatch.concatenate([padded]), padded)
    for batches, message in [
        ([], "batches: expected at least one"),
        ([padded, batch], "got 3 rows in batch 0, whose trees end at 2"),
        ([batch, batch.to("meta")], "batches: expected all on cpu, got batch 1 on meta"),
        ([batch, TreeBatch(**{**vars(batch), "mask": batch.mask[0, 0]})], "mask: expected shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            TreeBatch.concatenate(batches)


@given(trees=st.lists(tree_parents(20), min_size=1, max_size=4), spare=st.integers(0, 3), data=st.data())
def test_narrow_leaves_the_named_trees(backend, device, trees, spare, data) -> None:
    start = data.draw(st.integers(0, len(trees)))
    length = data.draw(st.integers(0, len(trees) - start))
    bounds = {"max_nodes": 20, "max_depth": 19, "device": device}
    hosts = [DraftTree(parents) for parents in trees]
    batch = TreeBatch.from_trees(hosts, capacity=sum(tree.num_nodes for tree in hosts) + spare, **bounds)
    part = batch.narrow(start, length)
    assert_same_batches(part, TreeBatch.from_trees(hosts[start : start + length], **bounds))
    assert part.parents.data_ptr() == batch.parents.data_ptr() or start > 0 or part.parents.numel() == 0
    if spare == 0:
        assert_same_batches(TreeBatch.concatenate([batch.narrow(0, 1), batch.narrow(1, len(trees) - 1)]), batch)


def test_narrow_refuses() -> None:
    batch = TreeBatch.from_trees([DraftTree.chain(1)] * 2)
    for start, length in [(-1, 1), (0, 3), (3, 0), (1, -1), (2**62, 2**62)]:
        with pytest.raises(ValueError, match=f"start, length: expected a range within 2 trees, got {start} and"):
            batch.narrow(start, length)
    for offsets in ([0, 2, 5], [0, 3, 2], [-1, 2, 4]):
        wrong = TreeBatch(**{**vars(batch), "cu_nodes": int32(offsets, "cpu")})
        with pytest.raises(ValueError, match="cu_nodes: expected offsets that ascend from 0 to at most 4"):
            wrong.narrow(*((1, 1) if offsets[1] == 3 else (0, 2)))
    with pytest.raises(ValueError, match="mask: expected shape"):
        TreeBatch(**{**vars(batch), "mask": batch.mask[:1]}).narrow(0, 1)


def test_from_trees_refuses() -> None:
    tree = DraftTree.full([3])
    with pytest.raises(ValueError, match="max_nodes = 3"):
        TreeBatch.from_trees([tree], max_nodes=3)
    with pytest.raises(ValueError, match="max_depth = 0"):
        TreeBatch.from_trees([tree], max_depth=0)
    with pytest.raises(ValueError, match="at least 8 rows"):
        TreeBatch.from_trees([tree, tree], capacity=7)
    with pytest.raises(ValueError, match="max_nodes"):
        TreeBatch.from_trees([], max_nodes=0)


def test_tree_of_a_malformed_batch() -> None:
    batch = build_trees(int32([-1, 0, -1, 5]), int32([0, 2, 4]), max_nodes=2, max_depth=1)
    assert batch.valid.tolist() == [True, False]
    assert batch.tree(0).num_nodes == 2
    with pytest.raises(ValueError, match="parents"):
        batch.tree(1)


# torch ----------------------------------------------------------------------------------------------------------------


def test_trees_are_made_outside_of_compiled_code() -> None:
    tree = DraftTree.full([2, 1])

    def drafts(logits: Tensor) -> Tensor:
        return medusa_propose(logits, tree).draft_tokens

    def inner_tree(logits: Tensor) -> Tensor:
        return medusa_propose(logits, DraftTree.full([2, 1])).draft_tokens

    logits = torch.randn(1, 2, 8)
    compiled = torch.compile(drafts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits), drafts(logits))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(inner_tree, fullgraph=True, backend="aot_eager")(logits)
    assert torch.equal(torch.compile(inner_tree, backend="aot_eager")(logits), drafts(logits))


def test_active_tells_idle_sequences_from_malformed_trees(device):
    trees = build_trees(
        torch.tensor([-1, 0, 5, -1, 0, -1], dtype=torch.int32, device=device),  # the last row is padding
        torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=device),
        max_nodes=4,
        max_depth=3,
    )
    assert trees.valid.tolist() == [False, False, True]
    assert trees.active.tolist() == [True, False, True] and trees.active.device == trees.cu_nodes.device
    assert TreeBatch.from_trees([], device=device).active.shape == (0,)
