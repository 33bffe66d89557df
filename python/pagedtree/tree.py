"""Draft trees: one on the host (`DraftTree`), a ragged batch of them on a device (`TreeBatch`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pagedtree._arguments import checked, expect_integers, expect_shape, expect_type, refusal
from pagedtree._ops import call, makes_fakes, ops, register_fake
from pagedtree.bits import unpacked

__all__ = ["DraftTree", "TreeBatch", "build_trees", "mask_words"]

MAX_NODES = 1024


def _assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Acts as torch.compiler.assume_constant_result without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class DraftTree:
    """The shape of one draft tree. Node 0 is the root; a node's parent has a smaller index.

    Inside compiled code a new tree breaks the graph, and raises under fullgraph=True; `build_trees` does not.

    Attributes (int32 numpy arrays of length `num_nodes`, local indices, -1 = none):
        parents, depths, first_child, next_sibling; siblings are in index order.
        num_nodes, max_depth: ints.
        mask: bool [n, n]; mask[i, j] = node j is i or an ancestor of i.
    """

    def __init__(self, parents: Sequence[int] | np.ndarray) -> None:
        array = np.array(parents)
        if array.size and array.dtype.kind not in "iu":
            raise refusal("parents", "integers", array.dtype, TypeError)
        if array.ndim != 1 or not 1 <= array.size <= MAX_NODES:
            raise refusal("parents", f"1 to {MAX_NODES} nodes in one dimension", f"shape {array.shape}")
        if array[0] != -1:
            raise refusal("parents", "parents[0] == -1 (the root)", array[0])
        nodes = np.flatnonzero((array[1:] < 0) | (array[1:] >= np.arange(1, array.size)))
        if nodes.size:
            node = int(nodes[0]) + 1
            raise refusal("parents", "0 <= parents[i] < i", f"parents[{node}] == {array[node]}")
        n = array.size
        self.num_nodes = n
        self.parents: np.ndarray = array.astype(np.int32)
        links = ops.build_trees(
            torch.from_numpy(self.parents),
            torch.tensor([0, n], dtype=torch.int32, device="cpu"),
            max_nodes=n,
            max_depth=n - 1,
        )
        self.depths, self.first_child, self.next_sibling = (t.numpy() for t in links[:3])
        self._mask_words: np.ndarray = links[3].numpy()
        self.max_depth = int(self.depths.max())
        self._path_ranks: np.ndarray | None = None
        self._copies: dict[torch.device, tuple[Tensor, Tensor, Tensor, int]] = {}

    @classmethod
    def from_parents(cls, parents: Sequence[int] | np.ndarray) -> DraftTree:
        """Returns the tree with these parents: parents[0] == -1 and 0 <= parents[i] < i, else ValueError."""
        return cls(parents)

    @classmethod
    @checked()
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> DraftTree:
        """Returns the tree of child-rank paths (Medusa, EAGLE): [1, 0] is the first child of the root's second child.

        The root is added; nodes are ordered by (depth, path). Every proper prefix of a path must be listed, no path
        twice, ranks >= 0, else ValueError. Ranks may leave gaps.
        """
        try:
            listed = sorted((tuple(map(index, path)) for path in paths), key=lambda path: (len(path), path))
        except TypeError as error:
            raise refusal("paths", f"sequences of integers, {error}", kind=TypeError) from None
        node_of: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for path in listed:
            if not path:
                raise refusal("paths", "paths of at least one rank (the root is added)", "an empty path")
            if path in node_of:
                raise refusal("paths", "each path once", f"{list(path)} twice")
            if min(path) < 0 or max(path) >= 2**31:
                raise refusal("paths", "ranks >= 0 and below 2^31", list(path))
            if path[:-1] not in node_of:
                raise refusal("paths", "every prefix to be listed", f"{list(path)} without its parent")
            parents.append(node_of[path[:-1]])
            node_of[path] = len(node_of)
        tree = cls(parents)
        tree._path_ranks = np.array([-1, *(path[-1] for path in listed)], dtype=np.int32)
        return tree

    @classmethod
    @checked()
    def chain(cls, num_draft_tokens: int) -> DraftTree:
        if not 0 <= num_draft_tokens < MAX_NODES:
            raise refusal("num_draft_tokens", f"0 to {MAX_NODES - 1}", num_draft_tokens)
        return cls(np.arange(-1, num_draft_tokens))

    @classmethod
    @checked()
    def full(cls, branching: Sequence[int]) -> DraftTree:
        """Returns the tree in which every node of level d has branching[d] children, level by level."""
        if any(width < 0 for width in branching):
            raise refusal("branching", "widths >= 0", list(branching))
        parents, level = [-1], [0]
        for width in branching:
            if len(parents) + len(level) * width > MAX_NODES:
                raise refusal("branching", f"at most {MAX_NODES} nodes", list(branching))
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(parents)

    @property
    def mask(self) -> np.ndarray:
        return unpacked(torch.from_numpy(self._mask_words), self.num_nodes).numpy()

    @property
    def child_ranks(self) -> np.ndarray:
        """int32 [n]: the last rank of the node's path, else how many siblings come before it; -1 at the root."""
        if self._path_ranks is not None:
            return self._path_ranks
        ranks, next_sibling = [-1] * self.num_nodes, self.next_sibling.tolist()
        for child in self.first_child.tolist():
            rank = 0
            while child >= 0:
                ranks[child] = rank
                child, rank = next_sibling[child], rank + 1
        return np.array(ranks, dtype=np.int32)

    # A method: torch < 2.13 accepts no tree as an argument of a function marked constant.
    @_assume_constant_result
    def _on_device(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
        """Returns parents, depths, child ranks as tensors on `device`, copied once, and the number of ranks."""
        copies = self._copies.get(device)
        is_faked = makes_fakes()  # a trace can neither use nor fill the cache
        if copies is None or is_faked:
            ranks = self.child_ranks
            parents, depths, child_ranks = (torch.from_numpy(a).to(device) for a in (self.parents, self.depths, ranks))
            for t in (parents, depths, child_ranks):
                # As by torch's mark_static: constants have no dynamic shapes.
                t._dynamo_static_indices = {0}  # type: ignore[attr-defined]
            copies = parents, depths, child_ranks, int(ranks.max()) + 1
            if not is_faked:
                self._copies[device] = copies
        return copies

    def __repr__(self) -> str:
        return f"DraftTree(num_nodes={self.num_nodes}, max_depth={self.max_depth})"


@dataclass(frozen=True)
class TreeBatch:
    """A ragged batch of B trees with N rows on one device; row cu_nodes[b] + i is node i of tree b.

    Attributes:
        cu_nodes: int32 [B + 1], offsets of the trees' rows.
        parents, depths, first_child, next_sibling: int32 [N], local indices, -1 = none. An unreachable node and a
            padding row have depth -1, no links and an empty mask row.
        mask: int32 [N, W], W = ceil(max_nodes / 32); bit j % 32 of word j // 32 = node j is the row's node or
            its ancestor.
        valid: bool [B], False where the tree was malformed (see `build_trees`).
        max_nodes, max_depth: bounds, Python ints, the same for every step of a captured graph.
    """

    cu_nodes: Tensor
    parents: Tensor
    depths: Tensor
    first_child: Tensor
    next_sibling: Tensor
    mask: Tensor
    valid: Tensor
    max_nodes: int
    max_depth: int

    def _check(self) -> None:
        offsets, rows, device = self.cu_nodes.shape, self.parents.shape, self.cu_nodes.device
        if len(offsets) != 1 or offsets[0] < 1:
            raise refusal("cu_nodes", "shape [B + 1]", list(offsets))
        if len(rows) != 1:
            raise refusal("parents", "shape [N]", list(rows))
        shapes = (offsets, rows, rows, rows, rows, (rows[0], -(-self.max_nodes // 32)), (offsets[0] - 1,))
        for name, shape in zip(_TENSOR_FIELDS, shapes, strict=True):
            tensor: Tensor = getattr(self, name)
            expect_shape(shape, **{name: tensor})
            if tensor.dtype != (torch.bool if name == "valid" else torch.int32):
                raise refusal(name, f"torch.{'bool' if name == 'valid' else 'int32'}", tensor.dtype)
            if tensor.device != device:
                raise refusal(name, f"a tensor on {device}", f"one on {tensor.device}")

    @property
    def batch_size(self) -> int:
        return self.cu_nodes.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.cu_nodes.device

    @property
    def active(self) -> Tensor:
        """bool [B]: False for a tree of no nodes (idle). `valid` and a verdict's status count it as malformed."""
        return self.cu_nodes.diff() > 0

    @classmethod
    @checked()
    def from_trees(
        cls,
        trees: Sequence[DraftTree],
        *,
        max_nodes: int | None = None,
        max_depth: int | None = None,
        capacity: int | None = None,
        device: torch.device | str | None = None,
    ) -> TreeBatch:
        """Returns the batch of host trees, on `device` (default cpu).

        max_nodes, max_depth: bounds, for `copy_` of larger trees; default the trees' own.
        capacity: rows N, at least the sum of the trees' nodes (default); rows past the last tree are padding.
        Raises ValueError where a tree exceeds a bound.
        """
        sizes = [tree.num_nodes for tree in trees]
        nodes = max(sizes, default=1) if max_nodes is None else max_nodes
        depth = max((tree.max_depth for tree in trees), default=0) if max_depth is None else max_depth
        rows = sum(sizes) if capacity is None else capacity
        for i, tree in enumerate(trees):
            if tree.num_nodes > nodes:
                raise refusal("trees", f"at most max_nodes = {nodes} nodes", f"{tree.num_nodes} in tree {i}")
            if tree.max_depth > depth:
                raise refusal("trees", f"depth <= max_depth = {depth}", f"{tree.max_depth} in tree {i}")
        if not sum(sizes) <= rows < 2**31:
            raise refusal("capacity", f"at least {sum(sizes)} rows for these trees, below 2^31", rows)
        parents = np.full(rows, -1, dtype=np.int32)
        if trees:
            parents[: sum(sizes)] = np.concatenate([tree.parents for tree in trees])
        cu_nodes = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
        return build_trees(
            torch.from_numpy(parents).to(device or "cpu"),
            cu_nodes.to(device or "cpu"),
            max_nodes=nodes,
            max_depth=depth,
        )

    @classmethod
    @checked()
    def concatenate(cls, batches: Sequence[TreeBatch]) -> TreeBatch:
        """Returns the trees of all `batches`, at least one, in order: a batch of B_1 + B_2 + ... trees in new tensors.

        max_nodes and max_depth are the largest of the batches'. Only the last batch may have padding rows (`narrow`
        drops them), which is not checked on a GPU. Raises ValueError for no batch, misplaced padding, batches on
        different devices, or inconsistent tensors.
        """
        if not batches:
            raise refusal("batches", "at least one", "none")
        device, offset, offsets = batches[0].device, 0, []
        for i, batch in enumerate(batches):
            batch._check()
            if batch.device != device:
                raise refusal("batches", f"all on {device}", f"batch {i} on {batch.device}")
            rows, is_last = batch.parents.shape[0], i == len(batches) - 1
            if not is_last and device.type == "cpu" and int(batch.cu_nodes[-1]) != rows:
                found = f"{rows} rows in batch {i}, whose trees end at {int(batch.cu_nodes[-1])}"
                raise refusal("batches", "no padding but in the last one", found)
            offsets.append((batch.cu_nodes if is_last else batch.cu_nodes[:-1]) + offset)
            offset += rows
        joined = {
            name: torch.cat([getattr(batch, name) for batch in batches])
            for name in _TENSOR_FIELDS
            if name not in ("cu_nodes", "mask")
        }
        words = max(batch.mask.shape[1] for batch in batches)
        masks = [batch.mask for batch in batches]
        masks = [F.pad(mask, (0, words - mask.shape[1])) if mask.shape[1] < words else mask for mask in masks]
        return cls(
            cu_nodes=torch.cat(offsets),
            mask=torch.cat(masks),
            max_nodes=max(batch.max_nodes for batch in batches),
            max_depth=max(batch.max_depth for batch in batches),
            **joined,
        )

    def narrow(self, start: int, length: int) -> TreeBatch:
        """Returns trees `start` to `start + length - 1`, B = length, without padding rows. Synchronises.

        The tensors are views of this batch's, except cu_nodes if the first tree's rows do not begin at 0. Raises
        ValueError for trees outside the batch, offsets that descend or pass N, and inconsistent tensors.
        """
        expect_integers(start=start, length=length)
        self._check()
        if start < 0 or length < 0 or start + length > self.batch_size:
            raise refusal("start, length", f"a range within {self.batch_size} trees", f"{start} and {length}")
        offsets, num_rows = self.cu_nodes[start : start + length + 1], self.parents.shape[0]
        ends = offsets.tolist()
        begin, end = ends[0], ends[-1]
        if not 0 <= begin <= end <= num_rows:
            raise refusal("cu_nodes", f"offsets that ascend from 0 to at most {num_rows}", f"{begin} and {end}")
        rows = slice(begin, end)
        return TreeBatch(
            offsets - begin if begin else offsets,
            self.parents[rows],
            self.depths[rows],
            self.first_child[rows],
            self.next_sibling[rows],
            self.mask[rows],
            self.valid[start : start + length],
            self.max_nodes,
            self.max_depth,
        )

    def to(self, device: torch.device | str) -> TreeBatch:
        return replace(self, **{name: getattr(self, name).to(device) for name in _TENSOR_FIELDS})

    def copy_(self, other: TreeBatch) -> TreeBatch:
        """Writes `other` into this batch's tensors, which keep their addresses and shapes (for replayed graphs).

        `other` must have the same B, and at most this batch's max_nodes, max_depth and rows; other rows become padding.
        """
        expect_type("other", other, TreeBatch)
        self._check()
        other._check()
        if other.batch_size != self.batch_size:
            raise refusal("other", f"batch_size = {self.batch_size}", other.batch_size)
        for name in ("max_nodes", "max_depth"):
            if getattr(other, name) > getattr(self, name):
                raise refusal("other", f"{name} <= {getattr(self, name)}", getattr(other, name))
        rows = other.parents.shape[0]
        if rows > self.parents.shape[0]:
            raise refusal("other", f"at most {self.parents.shape[0]} rows", rows)
        self.cu_nodes.copy_(other.cu_nodes)
        self.valid.copy_(other.valid)
        for name in ("parents", "depths", "first_child", "next_sibling"):
            mine: Tensor = getattr(self, name)
            mine[:rows].copy_(getattr(other, name))
            mine[rows:].fill_(-1)
        words = other.mask.shape[1]
        self.mask[:rows, :words].copy_(other.mask)
        self.mask[:rows, words:].zero_()
        self.mask[rows:].zero_()
        return self

    @checked()
    def tree(self, b: int) -> DraftTree:
        """Returns tree b on the host (synchronises). Raises ValueError if it is malformed."""
        self._check()
        if not 0 <= b < self.batch_size:
            raise refusal("b", f"0 to {self.batch_size - 1}", b)
        begin, end = self.cu_nodes[b : b + 2].tolist()
        return DraftTree(self.parents[begin:end].cpu().numpy())


_TENSOR_FIELDS = [field.name for field in fields(TreeBatch) if field.name not in ("max_nodes", "max_depth")]


def build_trees(parents: Tensor, cu_nodes: Tensor, *, max_nodes: int, max_depth: int) -> TreeBatch:
    """Links a ragged batch of trees on their device, without synchronising.

    Args:
        parents: int32 [N], local indices: -1 at each tree's node 0, else 0 <= parents[i] < i.
        cu_nodes: int32 [B + 1], first 0; rows past cu_nodes[B] are padding.
        max_nodes, max_depth: bounds of one tree, 1..1024 nodes; they fix the widths of mask and verdict.

    A malformed tree sets valid[b] = False: a parent not in 0..i - 1, a root whose parent is not -1, more than max_nodes
    nodes, a node deeper than max_depth, or no node at all. Such a node and its descendants are unreachable: depth -1,
    an empty mask row, no link to them.

        for i, p in enumerate(parents_of_tree):
            if i == 0: depth, mask = 0, {0}
            elif 0 <= p < i and i < max_nodes and 0 <= depth[p] < max_depth: depth, mask = depth[p] + 1, mask[p] | {i}
            else: depth, mask, valid = -1, {}, False

    Sources: the masks of SpecInfer (Miao et al., 2023); links by first child and next sibling as in SGLang.

    Raises ValueError for wrong shapes, dtypes or bounds; with PAGEDTREE_CHECK=1 also for offsets that descend or pass
    N.
    """
    depths, first_child, next_sibling, mask, valid = call(
        ops.build_trees, parents, cu_nodes, max_nodes=max_nodes, max_depth=max_depth
    )
    return TreeBatch(cu_nodes, parents, depths, first_child, next_sibling, mask, valid, max_nodes, max_depth)


def mask_words(mask: Tensor, cu_nodes: Tensor | None = None, *, max_nodes: int | None = None) -> Tensor:
    """Packs masks of booleans or of biases into the words that `tree_attention` takes.

    Args:
        mask: bool (True is seen), or float32, float16 or bfloat16 (values above -10000, as the dtype rounds it, are
            seen, NaN is not), of any strides. [T, M]: column j is node j of the row's tree. [T, T] with cu_nodes:
            column cu_nodes[b] + j is node j of sequence b's tree; other sequences' columns are ignored.
        cu_nodes: int32 [B + 1], offsets of the sequences' rows; rows past cu_nodes[B] become 0.
        max_nodes: with cu_nodes alone, the most nodes of a tree, default T, at most max(T, 65536); further nodes are
            dropped.

    Returns int32 [T, W]: bit j % 32 of word j // 32 is node j, W = ceil(M / 32) or ceil(max_nodes / 32), at least 1.
    For one mask per sequence pad them to M columns and stack them.

        for row, b in rows of each sequence:
            for j in range(min(size of tree b, max_nodes)): bit(words[row], j) = seen(mask[row, cu_nodes[b] + j])

    Raises ValueError for wrong shapes, dtypes or devices; with PAGEDTREE_CHECK=1 also for seen biases other than 0, and
    for trees of more than max_nodes nodes.
    """
    expect_type("mask", mask, Tensor)
    return call(ops.mask_words, mask, cu_nodes, max_nodes=max_nodes)


@register_fake("mask_words")
def _mask_words_fake(mask: Tensor, cu_nodes: Tensor | None = None, *, max_nodes: int | None = None) -> Tensor:
    if mask.dim() != 2:
        raise refusal("mask", "shape [T, M]", [*mask.shape], RuntimeError, "mask_words")
    nodes = mask.shape[1] if max_nodes is None else max_nodes
    return mask.new_empty((mask.shape[0], torch.sym_max((nodes + 31) // 32, 1)), dtype=torch.int32)


@register_fake("build_trees")
def _build_trees_fake(parents: Tensor, cu_nodes: Tensor, max_nodes: int, **others: object) -> tuple[Tensor, ...]:
    mask = parents.new_empty((parents.shape[0], (max_nodes + 31) // 32))
    valid = parents.new_empty((cu_nodes.shape[0] - 1,), dtype=torch.bool)
    return *(torch.empty_like(parents) for _ in range(3)), mask, valid
