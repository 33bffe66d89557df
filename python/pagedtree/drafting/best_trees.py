"""Trees within a budget: the best tree over given candidates, and the best nodes of a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from pagedtree._arguments import expect_type
from pagedtree._ops import call, ops, register_fake
from pagedtree.tree import TreeBatch

__all__ = ["best_first_tree", "select_nodes"]


@overload
def best_first_tree(
    log_probs: Tensor, tokens: Tensor, root_tokens: Tensor, num_nodes: int, *, return_log_probs: Literal[False] = False
) -> tuple[Tensor, TreeBatch]: ...


@overload
def best_first_tree(
    log_probs: Tensor, tokens: Tensor, root_tokens: Tensor, num_nodes: int, *, return_log_probs: Literal[True]
) -> tuple[Tensor, TreeBatch, Tensor]: ...


def best_first_tree(
    log_probs: Tensor, tokens: Tensor, root_tokens: Tensor, num_nodes: int, *, return_log_probs: bool = False
) -> tuple[Tensor, TreeBatch] | tuple[Tensor, TreeBatch, Tensor]:
    """Returns the likeliest tree of `num_nodes` nodes over H levels of K candidates.

    For drafters with independent levels (Medusa heads, block drafters): all nodes of a depth have the same K
    candidates. A node's joint log-probability is the sum along its path.

    Source: DDTree (Ringel and Romano, 2026), which builds it with a heap on the host.

    Args:
        log_probs: fp32 [B, H, K], last dimension contiguous, K candidates of each level, sorted or not. -inf and NaN
            are never taken; values above 0 count as 0. H at most 1023, K at most 2^20.
        tokens: int64 [B, H, K], last dimension contiguous, the candidates' ids, copied without a check.
        root_tokens: int64 [B], entered at the roots.
        num_nodes: nodes of each tree, root included, 1..1024.
        return_log_probs: also return the nodes' joint log-probabilities; exponentiated, survival estimates for
            `select_nodes`.

    Nodes are in descending order of joint log-probability, ties by depth, then by candidate ranks (indices among the K)
    from the root on. Sums are fp32, from the root down.

        tree, open = [], [(-0.0, 0, ())]                                    # cost, depth, ranks from the root on
        while open and len(tree) < num_nodes:
            cost, depth, path = heapq.heappop(open)
            tree.append((path, root_token if depth == 0 else tokens[depth - 1, path[-1]]))
            for rank in range(K if depth < H else 0):
                child = fp32(cost - min(log_probs[depth, rank], 0))
                if child < inf: heapq.heappush(open, (child, depth + 1, (*path, rank)))

    With fewer possible paths the last rows are unreachable (parent, depth and draft token -1).

    Returns draft_tokens int64 [B * num_nodes] and the trees, with max_nodes = num_nodes, max_depth = H and cu_nodes[b]
    = b * num_nodes; under return_log_probs also fp32 [B * num_nodes], 0 at roots, -inf at unreachable rows. Raises
    ValueError for wrong shapes, dtypes or bounds. Sorted levels (`torch.topk`) are faster: unsorted ones take time
    proportional to num_nodes * K.
    """
    expect_type("log_probs", log_probs, Tensor)
    draft_tokens, joints, *fields = call(ops.best_first_tree, log_probs, tokens, root_tokens, num_nodes)
    trees = _as_trees(fields, num_nodes, log_probs.shape[1])
    return (draft_tokens, trees, joints) if return_log_probs else (draft_tokens, trees)


def select_nodes(
    trees: TreeBatch, survival: Tensor, budget: int, *, limit: Tensor | None = None
) -> tuple[TreeBatch, Tensor]:
    """Keeps the likeliest nodes of a whole batch, within a budget of rows.

    Args:
        trees: the batch.
        survival: fp32 [N], the estimated probability that the node is on the accepted path. A node counts as at most
            its parent, so a root's value bounds its tree; NaN and negative values count as 0.
        budget: rows of the result, at least 0; below B, every tree's root still has a row.
        limit: int32 [1], number of nodes to keep, roots included; it may change between replays of one captured graph.
            Clamped to 0..budget, which is also the default.

    Every root is kept; of the other nodes the best by survival, ties by the lower row, so parents are kept too. The
    order stays. Unreachable nodes (depth -1) are never kept, nor is a node whose depth is not its parent's plus 1.

        def survives(row): return min(clean(survival[row]), survives(parent(row)) if parent(row) >= 0 else inf)
        roots, others = split(reachable rows)
        others = sorted(others, key=lambda row: (-survives(row), row))
        kept = sorted(roots + others[: max(min(limit, budget) - len(roots), 0)])

    Returns the trees of kept nodes, N = max(budget, B) rows, and node_map int32 [max(budget, B)]: the row of `trees`
    that row i was, -1 for padding, which comes last. max_nodes, max_depth and `valid` stay. Gather per-node values with
    `values[node_map.clamp(min=0).long()]`.

    Raises ValueError for wrong shapes, dtypes or bounds.
    """
    expect_type("trees", trees, TreeBatch)
    *fields, node_map = call(
        ops.select_nodes,
        trees.cu_nodes,
        trees.parents,
        trees.depths,
        trees.valid,
        survival,
        budget,
        max_nodes=trees.max_nodes,
        max_depth=trees.max_depth,
        limit=limit,
    )
    return _as_trees(fields, trees.max_nodes, trees.max_depth), node_map


def _as_trees(fields: Sequence[Tensor], max_nodes: int, max_depth: int) -> TreeBatch:
    cu_nodes, parents, depths, first_child, next_sibling, mask, valid = fields
    return TreeBatch(cu_nodes, parents, depths, first_child, next_sibling, mask, valid, max_nodes, max_depth)


def _empty_trees(anchor: Tensor, batch: int, rows: int, max_nodes: int) -> tuple[Tensor, ...]:
    shapes: tuple[tuple[int, ...], ...] = ((batch + 1,), *[(rows,)] * 4, (rows, (max_nodes + 31) // 32))
    ints = (anchor.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return (*ints, anchor.new_empty((batch,), dtype=torch.bool))


@register_fake("best_first_tree")
def _best_first_tree_fake(log_probs: Tensor, tokens: Tensor, num_nodes: int, **others: object) -> tuple[Tensor, ...]:
    batch = log_probs.shape[0]
    rows = batch * num_nodes
    return (tokens.new_empty((rows,)), log_probs.new_empty((rows,)), *_empty_trees(tokens, batch, rows, num_nodes))


@register_fake("select_nodes")
def _select_nodes_fake(cu_nodes: Tensor, budget: int, max_nodes: int, **others: object) -> tuple[Tensor, ...]:
    batch = cu_nodes.shape[0] - 1
    capacity = max(budget, batch)
    return (*_empty_trees(cu_nodes, batch, capacity, max_nodes), cu_nodes.new_empty((capacity,)))
