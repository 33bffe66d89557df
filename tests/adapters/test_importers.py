"""The importers of examples/: TensorRT-LLM's trees and masks, lightllm's token pool."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import seeded
from support.attention import close, dense_attention, random_trees, tree_sees
from support.devices import placed
from torch import Tensor

from pagedtree import DraftTree, TreeBatch, compact_kv, tree_attention

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import lightllm_pool as lightllm
import tensorrt_llm_trees as trt


@pytest.mark.parametrize("example", [trt, lightllm])
def test_examples_run(example, capsys) -> None:
    example.main()
    assert capsys.readouterr().out


# TensorRT-LLM ---------------------------------------------------------------------------------------------------------

# The first choices of TensorRT-LLM's Medusa example, and its paths.
CHOICES = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2]]
LEAVES = [[0, 0, 0], [0, 1], [0, 2], [1, 0], [2]]
PATHS = [[0, 1, 4, 8], [0, 1, 5, -1], [0, 1, 6, -1], [0, 2, 7, -1], [0, 3, -1, -1]]
PARENTS = [-1, 0, 0, 0, 1, 1, 1, 2, 4]


def packed_by_numpy(trees: list[DraftTree], max_tokens: int) -> Tensor:
    words = -(-max_tokens // 32)
    bits = np.zeros((len(trees), max_tokens, 32 * words), dtype=bool)
    for b, tree in enumerate(trees):
        bits[b, : tree.num_nodes, : tree.num_nodes] = tree.mask
    return placed(torch.from_numpy(np.packbits(bits, axis=2, bitorder="little").view(np.int32)))


@pytest.mark.parametrize("choices", [CHOICES, LEAVES])
def test_choices(choices) -> None:
    assert trt.tree_from_choices(choices).parents.tolist() == PARENTS


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_paths(dtype) -> None:
    chain = [[0, 1, 2, -1], *[[-1] * 4] * 4]
    root = [[0, -1, -1, -1], *[[-1] * 4] * 4]
    trees = trt.trees_from_paths(torch.tensor([PATHS, chain, root], dtype=dtype))
    assert trees.valid.all()
    assert [trees.tree(b).parents.tolist() for b in range(3)] == [PARENTS, [-1, 0, 1], [-1]]
    assert trt.trees_from_paths(torch.zeros(0, 3, 4, dtype=dtype)).batch_size == 0


@pytest.mark.parametrize("max_tokens", [40, 64, 70])
def test_packed_masks_there_and_back(max_tokens) -> None:
    host = random_trees([40, 1, 33, 7])
    trees = TreeBatch.from_trees(host, capacity=90)  # rows of padding
    packed, lengths = trt.packed_mask_of(trees, max_tokens)
    assert torch.equal(packed, packed_by_numpy(host, max_tokens)) and lengths.tolist() == [40, 1, 33, 7]
    again = trt.trees_from_packed_mask(packed, lengths)
    assert again.valid.all()
    assert [again.tree(b).parents.tolist() for b in range(4)] == [tree.parents.tolist() for tree in host]
    rows, offsets = trt.flat_mask(packed, lengths)
    assert offsets.tolist() == [0, 40, 41, 74, 81]
    assert torch.equal(rows[:, : trees.mask.shape[1]], trees.mask[:81]) and not rows[:, trees.mask.shape[1] :].any()
    with pytest.raises(ValueError, match="max_tokens: expected at least the trees' 40 nodes, got 39"):
        trt.packed_mask_of(trees, 39)


# lightllm -------------------------------------------------------------------------------------------------------------


def test_token_pool(dtype) -> None:
    generator = seeded(0)
    buffer = torch.randn(120, 5, 64, generator=generator).to(dtype)  # 2 heads of K, 2 of V, one unused
    index = torch.randperm(120, generator=generator)[:90].view(3, 30).int()
    k_cache, v_cache = lightllm.cache_views(buffer[:, :4], 2)
    assert k_cache.shape == v_cache.shape == (120, 1, 2, 64)
    assert k_cache.data_ptr() == buffer.data_ptr() and v_cache.data_ptr() == buffer[:, 2:].data_ptr()

    trees, prefixes = random_trees([7, 1]), [15, 4]
    batch = TreeBatch.from_trees(trees, device=index.device)
    requests, lens = torch.tensor([2, 0], dtype=torch.int32), [22, 5]
    table = lightllm.page_table(index, requests, 25)
    assert table.shape == (2, 25) and table.dtype == torch.int32
    q = torch.randn(8, 4, 64, generator=generator).to(dtype)
    out = tree_attention(q, k_cache, v_cache, table, torch.tensor(lens, dtype=torch.int32), batch.cu_nodes, batch.mask)
    rows = [index[int(r), :s].long() for r, s in zip(requests, lens, strict=True)]
    for b, part in enumerate(out.split([7, 1])):
        k, v = buffer[rows[b], :2], buffer[rows[b], 2:4]
        close(part, dense_attention(q.split([7, 1])[b], k, v, tree_sees(trees[b], prefixes[b]))[0])

    expected = buffer.clone()
    for j, node in ((1, 3), (2, 5)):
        expected[rows[0][15 + j], :4] = buffer[rows[0][15 + node], :4]
    path, start = torch.tensor([[0, 3, 5], [0, -1, -1]], dtype=torch.int32), torch.tensor(prefixes, dtype=torch.int32)
    new = compact_kv([k_cache, v_cache], table, start, path, torch.tensor([2, 0], dtype=torch.int32))
    assert new.tolist() == [18, 5]
    assert torch.equal(buffer, expected)
