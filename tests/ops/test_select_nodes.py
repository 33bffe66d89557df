from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support import int32, seeded
from support.recurrent import trees_of

from pagedtree import DraftTree, TreeBatch, select_nodes

pytestmark = pytest.mark.usefixtures("on_device")


def test_a_small_batch(backend: str) -> None:
    trees = TreeBatch.from_trees([DraftTree.full([2, 1]), DraftTree.chain(2)], device=torch.get_default_device())
    #                        root  1    2    3 (of 1) 4 (of 2)  root 1    2
    survival = torch.tensor([1.0, 0.2, 0.7, 0.9, 0.6, 1.0, 0.5, 0.9])
    batch, node_map = select_nodes(trees, survival, 6)
    assert node_map.tolist() == [0, 2, 4, 5, 6, 7]  # 3 counts 0.2, 7 counts 0.5, as their parents
    assert batch.cu_nodes.tolist() == [0, 3, 6]
    assert batch.parents.tolist() == [-1, 0, 1, -1, 0, 1] and batch.depths.tolist() == [0, 1, 2, 0, 1, 2]
    batch, node_map = select_nodes(trees, survival, 6, limit=int32([3]))
    assert node_map.tolist() == [0, 2, 5, -1, -1, -1] and batch.cu_nodes.tolist() == [0, 2, 3]
    assert batch.depths.tolist() == [0, 1, 0, -1, -1, -1] and batch.mask.flatten().tolist() == [1, 3, 1, 0, 0, 0]


def test_selected_trees_verify_like_trees_of_their_own(backend: str) -> None:
    """narrow, copy_ and tree() accept the selection."""
    trees = trees_of([9, 0, 12], 6)
    batch, node_map = select_nodes(trees, torch.rand(21, generator=seeded(7)), 12)
    for b, (begin, end) in enumerate(pairwise(batch.cu_nodes.tolist())):
        if begin < end:
            tree = batch.tree(b)
            assert tree.depths.tolist() == trees.depths[node_map[begin:end].long()].tolist()
    part = batch.narrow(2, 1)
    assert part.batch_size == 1 and part.parents.tolist() == batch.parents[int(batch.cu_nodes[2]) :].tolist()
    fixed = trees_of([9, 0, 12], 6)
    assert torch.equal(fixed.copy_(batch).parents[:12], batch.parents)
