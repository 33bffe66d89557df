"""Bookkeeping before and after a step's target pass, on the device and without synchronising."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagedtree._arguments import expect_type
from pagedtree._ops import call, ops, register_fake
from pagedtree.options import RequestOptions
from pagedtree.tree import TreeBatch
from pagedtree.verify import Verdict

__all__ = ["Commit", "commit", "prepare_step"]


class Commit(NamedTuple):
    """The result of a verified step; S = trees.max_depth + 1. Node ids and row ids start with the root.

    Attributes:
        start: int32 [B], position of the new root (the last token kept): old start + num_tokens.
        last_token: int64 [B], the new root's token; -1 if no token was kept.
        finished: bool [B], the path ended with an EOS token or the last token left, or no token was kept.
        num_accepted: int32 [B], draft tokens kept; for `compact_kv`, with the verdict's accept_index.
        num_tokens: int32 [B], tokens kept: tokens[b, : num_tokens[b]] of the verdict.
        accept_rows: int64 [B, S], flat rows (cu_nodes[b] + node) of the root and the nodes kept, then -1.
        draft_accept_index: int32 [B, S], accept_index for `compact_kv` on the draft model's cache. This and the
            following are None without node_map.
        draft_num_accepted: int32 [B].
        draft_missing: int64 [B, S], tokens kept, in order, that the draft cache lacks, up to position start - 1; then
            -1.
        draft_num_missing: int32 [B].
    """

    start: Tensor
    last_token: Tensor
    finished: Tensor
    num_accepted: Tensor
    num_tokens: Tensor
    accept_rows: Tensor
    draft_accept_index: Tensor | None
    draft_num_accepted: Tensor | None
    draft_missing: Tensor | None
    draft_num_missing: Tensor | None


def prepare_step(
    trees: TreeBatch, page_table: Tensor, start: Tensor, page_size: int, *, total_q: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the inputs of the target pass over a batch of trees, with one query per node.

    Args:
        trees: B trees of N rows (padding rows included).
        page_table: int32 [B, max_pages], rows may be strided.
        start: int32 [B], position of each root; negative = idle: its rows are padding (position 0, slot -1, seq_lens
            0).
        page_size: positions per page, >= 1.
        total_q: T, rows of the query, usually N. Nodes past it are cut off.

    Returns (positions, seq_lens, cu_seqlens_q, slots):
        positions: int64 [T], rotary position start + depth; start for an unreachable node, 0 for padding.
        seq_lens: int32 [B], start + nodes: the lengths once the tree is appended.
        cu_seqlens_q: int32 [B + 1], the offsets of the rows (cu_nodes, kept inside T).
        slots: int64 [T], slot of position start[b] + i; -1 for padding and where `slot_mapping` returns -1.

        for b in range(B):
            seq_lens[b] = start[b] + num_nodes[b]
            for i in range(num_nodes[b]):
                positions[cu_nodes[b] + i] = start[b] + max(depths[cu_nodes[b] + i], 0)
                slots[cu_nodes[b] + i] = slot(b, start[b] + i)

    Sources: positions by depth from SpecInfer (Miao et al., 2023), slots from PagedAttention (Kwon et al., SOSP 2023).

    Raises ValueError for wrong shapes, dtypes, devices or sizes; with PAGEDTREE_CHECK=1 also for offsets that descend
    or pass T or N, and for positions without a page.
    """
    expect_type("trees", trees, TreeBatch)
    return call(ops.prepare_step, trees.cu_nodes, trees.depths, page_table, start, page_size, total_q=total_q)


def commit(
    verdict: Verdict,
    trees: TreeBatch,
    start: Tensor,
    *,
    history: Tensor | None = None,
    history_lens: Tensor | None = None,
    eos_ids: Tensor | None = None,
    node_map: Tensor | None = None,
    options: RequestOptions | None = None,
    tokens_left: Tensor | None = None,
    history_rows: Tensor | None = None,
) -> Commit:
    """Commits a verdict: ends sequences at EOS or a limit, and records their tokens.

    Args:
        verdict: a verify op's result for `trees`.
        trees: the B trees that were verified.
        start: int32 [B], position of each root; negative = idle, like a tree of no nodes.
        history: int64 [B, H], rows may be strided, written: tokens are appended at history_lens[b], up to H.
        history_lens: int32 [B], written: grows by the tokens appended. Goes with history.
        eos_ids: int64 [E] for all or [B, E], rows may be strided; -1 = none. The path ends with its first such token.
        node_map: int32 [N], the K/V index in the draft model's tree of each target row, -1 where the draft cache has
            none (from `rerank_tree`). Nodes after the first missing one count as missing.
        options: its output_counts [B, V], if given, are written: each kept token counts once more.
        tokens_left: int32 [B], the most tokens that each sequence may keep; one that keeps so many is finished. Next
            step: tokens_left - num_tokens.
        history_rows: int32 [B], the row of each sequence in history [P, H] and history_lens [P]; outside 0..P-1 it is
            not recorded. Rows in use must differ.

    Returns a `Commit`. An idle sequence, or one with tokens_left <= 0, keeps its start; it is finished, its last_token
    is -1, nothing is appended.

        for b in range(B):
            nodes, tokens = accept_index[b, : num_accepted[b] + 1], tokens[b, : num_accepted[b] + 1]
            if any(token in eos_ids for token in tokens): cut both behind the first such token
            nodes, tokens = nodes[: max(tokens_left[b], 0)], tokens[: max(tokens_left[b], 0)]
            start[b] += len(tokens)
            history[b, history_lens[b] :] = tokens                   # as far as they fit
            output_counts[b, tokens] += 1                            # once for each time
            present = [0] + [node_map[row(node)] for node in nodes[1:]] up to the first -1
            draft_accept_index[b] = present
            draft_missing[b] = tokens[len(present) - 1 : len(nodes) - 1]

    A path stops before a node that does not ascend or is outside the tree and before a negative token.
    PAGEDTREE_CHECK=1 raises for such a path, for num_accepted outside 0..S - 1, descending offsets, history_lens
    outside 0..H, and history_rows outside -1..P - 1 or of two sequences.

    Raises ValueError for wrong shapes, dtypes or devices, before anything is written.
    """
    expect_type("verdict", verdict, Verdict)
    expect_type("trees", trees, TreeBatch)
    if options is not None:
        expect_type("options", options, RequestOptions)
    results = call(
        ops.commit,
        verdict.accept_index,
        verdict.num_accepted,
        verdict.tokens,
        trees.cu_nodes,
        start,
        history=history,
        history_lens=history_lens,
        eos_ids=eos_ids,
        node_map=node_map,
        output_counts=None if options is None else options.output_counts,
        tokens_left=tokens_left,
        history_rows=history_rows,
    )
    return Commit(*results[:6], *(results[6:] if node_map is not None else [None] * 4))


@register_fake("prepare_step")
def _prepare_step_fake(cu_nodes: Tensor, start: Tensor, total_q: int, **others: object) -> tuple[Tensor, ...]:
    rows = cu_nodes.new_empty((total_q,), dtype=torch.int64)
    return rows, torch.empty_like(start), torch.empty_like(cu_nodes), torch.empty_like(rows)


@register_fake("commit")
def _commit_fake(
    accept_index: Tensor, start: Tensor, node_map: Tensor | None = None, **others: object
) -> tuple[Tensor, ...]:
    batch, width = accept_index.shape
    mapped = 0 if node_map is None else batch

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return start.new_empty(shape, dtype=dtype)

    return (
        empty(batch),
        empty(batch, dtype=torch.int64),
        empty(batch, dtype=torch.bool),
        empty(batch),
        empty(batch),
        empty(batch, width, dtype=torch.int64),
        empty(mapped, width),
        empty(mapped),
        empty(mapped, width, dtype=torch.int64),
        empty(mapped),
    )
