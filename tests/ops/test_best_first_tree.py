"""best_first_tree: the most probable nodes of all trees over levels of candidates."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
from draft_checks import seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedtree import TreeBatch, best_first_tree, build_trees
from pagedtree.reference import drafting as loops

pytestmark = pytest.mark.usefixtures("on_device")

# Ties, what counts as 0 or is never taken, sums that round to the same number, sums that overflow.
STEPS = [0.0, -0.25, -0.5, -1.0, -1.0, math.nan, -math.inf, math.inf, 2.0, -0.0, -1e-8, -3e-8, -100.0, -2e38, -1e-45]


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Tokens that tell which candidate they are."""
    return torch.arange(math.prod(shape)).reshape(shape) * 3 - 5


def expect_tree(log_probs: Tensor, tokens: Tensor, roots: Tensor, num_nodes: int) -> TreeBatch:
    """Compares with plain loops; every field of the batch follows from the parents."""
    draft_tokens, trees, joints = best_first_tree(log_probs, tokens, roots, num_nodes, return_log_probs=True)
    batch = len(roots)
    assert trees.cu_nodes.tolist() == [b * num_nodes for b in range(batch + 1)]
    assert (trees.max_nodes, trees.max_depth) == (num_nodes, log_probs.shape[1])
    assert draft_tokens.dtype == torch.int64 and draft_tokens.shape == joints.shape == (batch * num_nodes,)
    trees._check()
    for b in range(batch):
        drafts, parents, sums = loops.best_first_tree(
            log_probs[b].cpu().numpy(), tokens[b].cpu().numpy(), int(roots[b]), num_nodes
        )
        missing = [-1] * (num_nodes - len(parents))
        rows = slice(b * num_nodes, (b + 1) * num_nodes)
        assert trees.parents[rows].tolist() == parents + missing
        assert draft_tokens[rows].tolist() == drafts + missing
        assert joints[rows].tolist() == sums + [-math.inf] * len(missing)
        assert trees.depths[rows].tolist()[len(parents) :] == missing
    linked = build_trees(trees.parents, trees.cu_nodes, max_nodes=num_nodes, max_depth=trees.max_depth)
    for name in ("depths", "first_child", "next_sibling", "mask"):
        assert torch.equal(getattr(trees, name), getattr(linked, name)), name
    assert trees.valid.tolist() == [True] * batch
    return trees


@pytest.mark.each_value
@pytest.mark.parametrize("num_nodes", [64, 65, 256, 257, 700])
@pytest.mark.parametrize("values", [STEPS[:4], [-0.5], 64, 1024], ids=["few values", "one value", "64ths", "1024ths"])
def test_large_trees(backend: str, num_nodes: int, values: list[float] | int) -> None:
    """With ties of many nodes and of few, also of two nodes of one lane of a warp."""
    shape, generator = (6, 6, 9), seeded(num_nodes)
    if isinstance(values, int):
        log_probs = torch.randn(shape, generator=generator).log_softmax(-1).mul(values).round() / values
    else:
        log_probs = torch.tensor(values)[torch.randint(0, len(values), shape, generator=generator)]
    log_probs[::2] = log_probs[::2].sort(dim=-1, descending=True).values
    expect_tree(log_probs, numbered(shape), torch.arange(6) + 7, num_nodes)


def paths(levels: int, width: int) -> list[tuple[int, ...]]:
    return [path for depth in range(1, levels + 1) for path in product(range(width), repeat=depth)]


@pytest.mark.parametrize("num_nodes", [2, 4, 6])
def test_no_other_tree_is_better(backend: str, num_nodes: int) -> None:
    """Of all trees of that size, this one has the greatest sum of path probabilities: it accepts most on average."""
    levels, width = 3, 2
    log_probs = (torch.randn(1, levels, width, generator=seeded(num_nodes)) * 1.5).log_softmax(-1)
    probability = {path: math.exp(sum(float(log_probs[0, d, r]) for d, r in enumerate(path))) for path in paths(3, 2)}
    best = max(
        sum(probability[path] for path in tree)
        for tree in combinations(probability, num_nodes - 1)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )
    draft_tokens, trees = best_first_tree(
        log_probs, numbered((1, levels, width)), torch.zeros(1, dtype=torch.int64), num_nodes
    )
    rank_of = {(int(token) + 5) // 3 for token in draft_tokens[1:]}
    assert len(rank_of) <= num_nodes - 1
    of_node = [()]
    for node in range(1, num_nodes):
        of_node.append((*of_node[trees.parents[node]], (int(draft_tokens[node]) + 5) // 3 % width))
    assert math.isclose(sum(probability[path] for path in of_node[1:]), best, rel_tol=1e-6)


def nodes_of(log_probs: list[list[float]], num_nodes: int) -> list[tuple[int, ...]]:
    """The nodes of one sequence's tree, as ranks from the root on; levels may have different widths."""
    width = max(map(len, log_probs))
    values = torch.tensor([[level + [math.nan] * (width - len(level)) for level in log_probs]])
    ranks = torch.arange(values.shape[2]).expand(values.shape)
    draft_tokens, trees = best_first_tree(values, ranks.contiguous(), torch.tensor([0]), num_nodes)
    found: list[tuple[int, ...]] = [()]
    for node in range(1, num_nodes):
        if trees.depths[node] >= 0:
            found.append((*found[trees.parents[node]], int(draft_tokens[node])))
    return found


def test_order_and_ties(backend: str) -> None:
    assert nodes_of([[-1.0, -0.5], [-0.25, -2.0]], 5) == [(), (1,), (1, 0), (0,), (0, 0)]
    # Of equal ones the shallower comes first, then the lower ranks from the root on.
    assert nodes_of([[-1.0, -1.0], [0.0, 0.0]], 7) == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert nodes_of([[0.0], [0.0], [0.0]], 4) == [(), (0,), (0, 0), (0, 0, 0)]
    # Both are -2 at depth 2: the path of the lower first rank leads, though its parent came later.
    assert nodes_of([[-1.5, -1.0], [-0.5, -1.0]], 6) == [(), (1,), (0,), (1, 0), (0, 0), (1, 1)]
    assert nodes_of([[3.0, math.inf, -0.1]], 4) == [(), (0,), (1,), (2,)]  # above 0 counts as 0


def test_sums_that_round_to_the_same_number_are_ties(backend: str) -> None:
    """-1e-8 is less than 0, but not after -100: then the lower rank comes first, not the better candidate."""
    assert nodes_of([[-100.0], [-2e-8, -1e-8, -3e-8]], 5) == [(), (0,), (0, 0), (0, 1), (0, 2)]
    assert nodes_of([[-1e-9], [-2e-8, -1e-8, -3e-8]], 5) == [(), (0,), (0, 1), (0, 0), (0, 2)]
    # The tie is of children of different parents.
    level = [-(2.0**-26), -(2.0**-27)]
    assert nodes_of([level, [-1.0, -50.0]], 5) == [(), (1,), (0,), (0, 0), (1, 0)]


def test_what_is_never_taken(backend: str) -> None:
    never = [math.nan, -math.inf]
    assert nodes_of([never, [0.0, 0.0]], 4) == [()]
    assert nodes_of([[*never, -1.0], never], 4) == [(), (2,)]
    assert nodes_of([[-3e38], [-3e38]], 3) == [(), (0,)]  # the sum is -inf


def test_shorter_trees_are_valid(backend: str) -> None:
    log_probs = torch.tensor([[[-1.0, -math.inf]], [[-1.0, -2.0]]])
    draft_tokens, trees = best_first_tree(log_probs, torch.tensor([[[8, 9]], [[6, 7]]]), torch.tensor([3, 4]), 4)
    assert draft_tokens.tolist() == [3, 8, -1, -1, 4, 6, 7, -1]
    assert trees.depths.tolist() == [0, 1, -1, -1, 0, 1, 1, -1]
    assert trees.mask.flatten().tolist() == [1, 3, 0, 0, 1, 3, 5, 0]
    assert trees.valid.tolist() == [True, True] and trees.cu_nodes.tolist() == [0, 4, 8]


def test_strides(backend: str) -> None:
    """Levels before the batch, as a stack of heads has them, and columns of wider rows."""
    generator = seeded(3)
    log_probs = torch.randn(4, 3, 9, generator=generator).sub(2)[:, :, 1:6].transpose(0, 1)
    tokens = torch.randint(0, 99, (3, 5, 7), generator=generator)[:, 1:, 2:]
    expect_tree(log_probs, tokens, torch.arange(3), 11)
    expect_tree(log_probs[:, :, :1], tokens[:, :, :1], torch.arange(3), 11)


def test_tokens_are_copied(backend: str) -> None:
    tokens = torch.tensor([[[-1, 2**62, -(2**63)]]])
    draft_tokens, _ = best_first_tree(torch.tensor([[[0.0, -1.0, -2.0]]]), tokens, torch.tensor([-9]), 4)
    assert draft_tokens.tolist() == [-9, -1, 2**62, -(2**63)]


@given(st.integers(0, 2**31))
def test_any_bits(backend: str, seed: int) -> None:
    bits = torch.randint(-(2**31), 2**31, (2, 3, 8), generator=seeded(seed)).to(torch.int32)
    expect_tree(bits.view(torch.float32), numbered((2, 3, 8)), torch.tensor([0, 1]), 20)


def test_numpy_reference_is_the_definition() -> None:
    """The loops that the op is compared with, against sorting all paths."""
    log_probs = np.array([[-1.0, -0.5, np.nan], [-0.25, -2.0, -np.inf]], dtype=np.float32)
    drafts, parents, joints = loops.best_first_tree(log_probs, np.arange(6).reshape(2, 3), -1, 7)
    assert drafts == [-1, 1, 3, 0, 3, 4, 4] and parents == [-1, 0, 1, 0, 3, 1, 3]
    assert joints == [0, -0.5, -0.75, -1, -1.25, -2.5, -3]
