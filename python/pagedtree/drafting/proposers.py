"""Trees without a draft model: from the text itself (n-grams) or from Medusa heads."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree._arguments import checked, expect_type, refusal
from pagedtree._ops import call, ops, register_fake
from pagedtree.drafting.draft import Draft
from pagedtree.tree import MAX_NODES, DraftTree, TreeBatch, build_trees

__all__ = ["medusa_propose", "ngram_propose", "rejected_predictions"]


def ngram_propose(
    history: Tensor,
    history_lens: Tensor,
    *,
    max_nodes: int,
    max_depth: int,
    min_ngram: int = 1,
    max_ngram: int = 4,
    max_branches: int = 8,
    extra: Tensor | None = None,
    active: Tensor | None = None,
    history_rows: Tensor | None = None,
) -> Draft:
    """Drafts the continuations of earlier occurrences of the last tokens, merged into one tree.

    Sources: prompt lookup decoding (Saxena 2023), lookahead decoding (Fu et al., ICML 2024), the merging of
    continuations into a trie from REST (He et al., NAACL 2024).

    Args:
        history: int64 [B, H], prompt and generated tokens; row stride >= H. Negative tokens match nothing.
        history_lens: int32 [B], used tokens of each row; clamped to 0..H.
        max_nodes: most nodes of a tree, root included, 1..1024.
        max_depth: longest continuation, 0..1023.
        min_ngram, max_ngram: shortest and longest n-gram to look for, 1..64.
        max_branches: most leaves of a tree.
        extra: int64 [B, E], more text to search: runs of tokens separated by negative ones, the newest last; see
            `pagedtree.drafting.rejected_predictions`.
        active: bool [B]; False = finished: a tree of no nodes.
        history_rows: int32 [B], each sequence's row in a pool of histories: history is then [P, H], history_lens [P]. A
            row outside 0..P-1 is an empty history; PAGEDTREE_CHECK=1 raises for any but -1.

    An empty history gives a tree of no nodes; no match, the root alone. Nodes are in insertion order, best first.

        tree = Trie(root=history[-1])
        for n in range(max_ngram, min_ngram - 1, -1):
            for text in (history, extra):
                for end in range(len(text) - 1, 0, -1):                     # most recent first
                    if common_suffix(text[:end], history, at_most=max_ngram) == n:
                        tree.insert(text[end : end + max_depth])            # up to the first negative token

    `insert` shares existing nodes; it stops at max_nodes, and before a branch that would exceed max_branches leaves.

    Scratch: 5 bytes for each of the B * (H + E) tokens and 24 for each of the B * max_nodes nodes.

    Returns a `Draft` of draft_tokens and trees. Raises ValueError for wrong shapes, dtypes or bounds.
    """
    draft_tokens, parents, cu_nodes = call(
        ops.ngram_propose,
        history,
        history_lens,
        max_nodes=max_nodes,
        max_depth=max_depth,
        min_ngram=min_ngram,
        max_ngram=max_ngram,
        max_branches=max_branches,
        extra=extra,
        active=active,
        history_rows=history_rows,
    )
    return Draft(draft_tokens, build_trees(parents, cu_nodes, max_nodes=max_nodes, max_depth=max_depth))


@checked(integers=("draft_tokens", "predictions", "accept_index"))
def rejected_predictions(
    trees: TreeBatch, draft_tokens: Tensor, predictions: Tensor, accept_index: Tensor, *, context: int = 4
) -> Tensor:
    """Returns the target's predictions at rejected nodes, as text for `ngram_propose(extra=)`.

    Source: lookahead decoding (Fu et al., ICML 2024).

    Args:
        trees: the verified batch.
        draft_tokens: int32 or int64 [N]; include the roots' tokens, so that runs may begin there.
        predictions: int64 [N], the target's token after each node (argmax of its logits).
        accept_index: int32 [B, S], the accepted nodes, -1 past them.
        context: path tokens per run, 1 to 1023; bounds the n-grams that can match in it.

    Returns int64 [B, max_nodes * (context + 2)]: one run per node, the first nodes last. To keep several steps,
    concatenate, the newest last: torch.cat([extra, new], 1)[:, -capacity:].

        for node in reversed(nodes):
            if reachable(node) and node != root and node not in accepted:
                path = tokens of root..node
                run = [*path[-context:], predictions[node]]
            else: run = []
            extra += [-1] * (context + 1 - len(run)) + run + [-1]

    Raises ValueError for wrong shapes.
    """
    trees._check()
    num_rows, max_nodes = trees.parents.shape[0], trees.max_nodes
    for name, tensor in (("draft_tokens", draft_tokens), ("predictions", predictions)):
        if tensor.shape != (num_rows,):
            raise refusal(name, f"shape [{num_rows}]", list(tensor.shape))
    if accept_index.dim() != 2 or accept_index.shape[0] != trees.batch_size:
        raise refusal("accept_index", f"shape [{trees.batch_size}, S]", list(accept_index.shape))
    if not 1 <= context < MAX_NODES:
        raise refusal("context", f"1..{MAX_NODES - 1}", context)
    for name, tensor in (("draft_tokens", draft_tokens), ("predictions", predictions), ("accept_index", accept_index)):
        if tensor.device != trees.device:
            raise refusal(name, trees.device, tensor.device)
    if num_rows == 0:
        return predictions.new_full((trees.batch_size, max_nodes * (context + 2)), -1)
    nodes = torch.arange(max_nodes, device=trees.device, dtype=torch.int64).expand(trees.batch_size, -1)
    begin, end = trees.cu_nodes[:-1, None].long(), trees.cu_nodes[1:, None].long()

    def at(values: Tensor, index: Tensor) -> Tensor:
        ids = values.long()[(begin + index).clamp(0, num_rows - 1)]
        return torch.where((index >= 0) & (begin + index < end), ids, -1)

    accepted = (accept_index[:, :, None] == nodes[:, None, :]).any(dim=1)
    rejected = torch.where((at(trees.depths, nodes) > 0) & ~accepted, nodes, -1)
    columns = [at(predictions, rejected)]
    ancestor = rejected
    for _ in range(context):
        columns.insert(0, at(draft_tokens, ancestor))
        ancestor = at(trees.parents, ancestor)
    runs = torch.stack([*columns, torch.full_like(rejected, -1)], dim=-1)
    return runs.flip(1).flatten(1)


def medusa_propose(
    head_logits: Tensor, tree: DraftTree, *, root_tokens: Tensor | None = None, active: Tensor | None = None
) -> Draft:
    """Fills a fixed tree with the best tokens of Medusa heads: a node takes its depth's head, its child rank in it.

    Source: Medusa (Cai et al., ICML 2024).

    Args:
        head_logits: fp32, fp16 or bf16 [B, H, V], last dimension contiguous; head h predicts the node at depth h + 1.
        tree: the same for every sequence, not deeper than H; child ranks below V, at most 1023.
        root_tokens: int64 [B], entered at the roots (else -1, which verification ignores).
        active: bool [B]; False = finished: a tree of no nodes.

    Ties go to the lower id. NaN reads as -inf. If too few tokens are above -inf for a rank, its node is -1.

        token[node] = sorted(range(V), key=lambda x: (-head_logits[b, depth[node] - 1, x], x))[child_rank[node]]

    Returns a `Draft` of draft_tokens [B * tree.num_nodes] and trees. Raises ValueError for wrong shapes, dtypes or a
    tree that the heads cannot fill.
    """
    expect_type("head_logits", head_logits, Tensor)
    expect_type("tree", tree, DraftTree)
    if head_logits.dim() != 3:
        raise refusal("head_logits", "shape [*, *, *] (B, H, V)", list(head_logits.shape))
    if tree.max_depth > head_logits.shape[1]:
        raise refusal("tree", f"depth <= {head_logits.shape[1]} (the heads)", tree.max_depth)
    parents, depths, child_ranks, num_top = tree._on_device(head_logits.device)
    limit = min(head_logits.shape[-1], MAX_NODES)
    if num_top > limit:
        raise refusal("tree", f"child ranks below {limit} (V)", num_top - 1)
    draft_tokens, all_parents, cu_nodes = call(
        ops.medusa_propose,
        head_logits[:, : tree.max_depth],
        parents,
        depths,
        child_ranks,
        num_top=num_top,
        root_tokens=root_tokens,
        active=active,
    )
    return Draft(draft_tokens, build_trees(all_parents, cu_nodes, max_nodes=tree.num_nodes, max_depth=tree.max_depth))


def _empty_drafts(ints: Tensor, batch: int, nodes: int) -> tuple[Tensor, ...]:
    """Returns draft_tokens, parents and cu_nodes uninitialised."""
    rows = (batch * nodes,)
    return ints.new_empty(rows, dtype=torch.int64), ints.new_empty(rows), ints.new_empty((batch + 1,))


@register_fake("ngram_propose")
def _ngram_propose_fake(
    history: Tensor, history_lens: Tensor, max_nodes: int, history_rows: Tensor | None = None, **others: object
) -> tuple[Tensor, ...]:
    return _empty_drafts(history_lens, (history if history_rows is None else history_rows).shape[0], max_nodes)


register_fake("medusa_propose")(
    lambda head_logits, parents, **others: _empty_drafts(parents, head_logits.shape[0], parents.shape[0])
)
