"""expand_tree on longer rows and more nodes than check's."""

from __future__ import annotations

import pytest
import torch
from support import seeded
from support.batches import packed_trees

from pagedtree import expand_tree, rerank_tree, start_draft

pytestmark = pytest.mark.usefixtures("on_device")


def test_log_softmax_accuracy(backend: str) -> None:
    logits = torch.randn(4, 100_003, generator=seeded(0)) * 3
    logits[1] -= 1000
    state = expand_tree(start_draft(torch.arange(4), max_kv_nodes=1), logits, num_children=64)
    expected = torch.log_softmax(logits.double(), 1).topk(64).values
    torch.testing.assert_close(state.scores[:, 1:].double(), expected, rtol=1e-6, atol=1e-5)


def test_more_than_a_word_of_kv_nodes(backend: str) -> None:
    """A node sees its parent's nodes and itself in every word, bit 31 included."""
    state, masks = start_draft(torch.tensor([1, 2]), max_kv_nodes=1024), torch.zeros(2, 101, 32, dtype=torch.int32)
    for num_children, num_frontier in [(40, 30), (4, 33), (4, 36), (2, 0)]:
        nodes = torch.arange(state.num_kv - state.num_frontier, state.num_kv).expand(2, -1)
        parents = state.parents.gather(1, state.frontier.long()).clamp(min=0)
        parents = state.kv_index.gather(1, parents.long()).clamp(min=0).long()
        bits = torch.nn.functional.one_hot(nodes, 1024).view(*nodes.shape, 32, 32)
        words = masks.gather(1, parents[..., None].expand(-1, -1, 32)) | (bits << torch.arange(32)).sum(-1).int()
        assert torch.equal(state.level_mask.view_as(words), words)
        masks.scatter_(1, nodes[..., None].expand_as(words), words)
        logits = torch.randn(nodes.numel(), 80, generator=seeded(num_children))
        state = expand_tree(state, logits, num_children=num_children, num_frontier=num_frontier)
    draft = rerank_tree(state, 300)
    assert draft.trees.valid.all() and draft.trees.max_depth == 4
    assert all(len(tokens) == 300 for tokens, _ in packed_trees(draft))
