"""TensorRT-LLM's draft trees as pagedtree's: choices, paths and packed masks.

python examples/tensorrt_llm_trees.py

Packed masks have the bits of `tree_attention`'s: bit j % 32 of word j // 32 of a row is set if the row's node sees
node j. But sequences are padded to the same number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pagedtree import DraftTree, TreeBatch, build_trees
from pagedtree.bits import unpacked
from pagedtree.tree import MAX_NODES


def tree_from_choices(choices: Iterable[Sequence[int]]) -> DraftTree:
    """Makes the tree of medusa_choices or eagle_choices: paths of child ranks, of all nodes or the leaves alone.

    Nodes are ordered by (depth, path), as in TensorRT-LLM.
    """
    paths = {tuple(path[:depth]) for path in choices for depth in range(1, len(path) + 1)}
    return DraftTree.from_paths(sorted(paths))


def trees_from_paths(paths: Tensor) -> TreeBatch:
    """Makes trees of node paths, int [B, paths, S]: from the root, 0, to a leaf, then -1 (medusa_paths)."""
    batch = paths.shape[0]
    sizes = paths.flatten(1).amax(1) + 1
    nodes = int(sizes.max()) if batch else 1
    if nodes > MAX_NODES:
        raise ValueError(f"paths: expected nodes below {MAX_NODES}, got {nodes - 1}")
    ends = torch.where((paths[..., 1:] >= 0) & (paths[..., :-1] >= 0), paths[..., 1:], nodes).flatten(1).long()
    parents = paths.new_full((batch, nodes + 1), -1).scatter_(1, ends, paths[..., :-1].flatten(1))
    return _trees(parents[:, :nodes], sizes)


def trees_from_packed_mask(packed_mask: Tensor, generation_lengths: Tensor) -> TreeBatch:
    """Makes trees of packed masks, int32 [B, max_tokens, W]: a node's parent is the last other node that it sees."""
    tokens = packed_mask.shape[1]
    seen = unpacked(packed_mask, min(tokens, 32 * packed_mask.shape[2])).tril(-1)
    numbers = torch.arange(1, seen.shape[2] + 1, dtype=torch.int32, device=seen.device)
    return _trees((seen * numbers).amax(2) - 1, generation_lengths)


def flat_mask(packed_mask: Tensor, generation_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (tree_mask int32 [T, W], cu_seqlens_q int32 [B + 1]) of packed masks without the padding."""
    lengths = generation_lengths.clamp(0, packed_mask.shape[1])
    used = torch.arange(packed_mask.shape[1], device=packed_mask.device) < lengths[:, None]
    return packed_mask[used], torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def packed_mask_of(trees: TreeBatch, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Returns (packed_mask int32 [B, max_tokens, ceil(max_tokens / 32)], generation_lengths int32 [B]), padded by 0."""
    if max_tokens < trees.max_nodes:
        raise ValueError(f"max_tokens: expected at least the trees' {trees.max_nodes} nodes, got {max_tokens}")
    lengths = trees.cu_nodes.diff()
    used = torch.arange(max_tokens, device=trees.device) < lengths[:, None]
    words = -(-max_tokens // 32)
    packed = torch.zeros(trees.batch_size, max_tokens, words, dtype=torch.int32, device=trees.device)
    rows = trees.mask[: int(trees.cu_nodes[-1])]
    packed[used] = torch.nn.functional.pad(rows, (0, words - rows.shape[1]))
    return packed, lengths


def _trees(parents: Tensor, sizes: Tensor) -> TreeBatch:
    """Builds trees of parents [B, nodes], of which sizes [B] are used."""
    sizes = sizes.clamp(0, parents.shape[1])
    used = torch.arange(parents.shape[1], device=parents.device) < sizes[:, None]
    cu_nodes = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    nodes = max(parents.shape[1], 1)
    return build_trees(parents[used].int(), cu_nodes, max_nodes=nodes, max_depth=nodes - 1)


def main() -> None:
    tree = tree_from_choices([[0, 0], [0, 1], [1, 0], [2]])
    packed, lengths = packed_mask_of(TreeBatch.from_trees([tree, DraftTree.chain(2)]), max_tokens=8)
    trees = trees_from_packed_mask(packed, lengths)
    print("parents", [trees.tree(b).parents.tolist() for b in range(2)])
    print("packed mask", packed[..., 0].tolist(), "of lengths", lengths.tolist())
    print("flat mask", flat_mask(packed, lengths)[0][:, 0].tolist())


if __name__ == "__main__":
    main()
