"""Verification: which drafts of a tree the target model accepts, and the token it adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import expect_type
from pagedtree._ops import call, ops, register_fake
from pagedtree.sampling import SamplingParams
from pagedtree.tree import TreeBatch
from pagedtree.verdict import Verdict

__all__ = ["verify_greedy", "verify_sampled"]


def verify_greedy(
    logits: Tensor,
    draft_tokens: Tensor,
    trees: TreeBatch,
    *,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
) -> Verdict:
    """Follows the child that drafted the argmax, as long as there is one. The tokens are those of greedy decoding.

    Args:
        logits: [N, V] float16, bfloat16 or float32, row stride >= V; row n is the target's prediction at node n, N the
            rows of `trees`. Only rows on the accepted path are read.
        draft_tokens: int32 or int64 [N], the token of each node; the roots' are ignored, ids outside 0..V-1 (-1) are
            no drafts.
        trees: B trees; a malformed tree's reachable part is verified and its status bit 1 set.
        grammar_mask: bool [N, V] or packed int32 [N, ceil(V / 32)] (bit x % 32 of word x // 32): False reads as a
            logit of -inf.
        draft_to_target: int32 or int64 [V_draft]: draft_tokens are then ids of a draft vocabulary, and
            draft_to_target[id] the target's id; an id outside 0..V_draft-1 is no draft.

    Returns a `Verdict`. Equal logits: the lowest id. NaN reads as -inf; a row without finite logit gives id 0; either
    sets status bit 2. Siblings that repeat a token: the first is followed.

        node = 0
        while True:
            emit(node, token := argmax(logits[node]))
            node = first child of node with draft_tokens[child] == token, else stop

    Sources: blockwise parallel decoding (Stern et al., NeurIPS 2018), for trees SpecInfer (Miao et al., 2023).

    Raises ValueError for wrong shapes, dtypes or devices, TypeError for wrong Python types.
    """
    return Verdict(
        *call(
            ops.verify_greedy,
            *_tree_arguments(logits, draft_tokens, trees),
            grammar_mask=grammar_mask,
            draft_to_target=draft_to_target,
        )
    )


def verify_sampled(
    logits: Tensor,
    draft_tokens: Tensor,
    trees: TreeBatch,
    params: SamplingParams,
    *,
    seeds: Tensor,
    positions: Tensor,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
) -> Verdict:
    """Samples the target at each node of the path, and follows the child that drafted the sampled token.

    Lossless for any tree and any drafter: the tokens are, one for one, what `sample` without drafts would draw with
    the same logits, seeds and positions, whatever else is in the batch. Acceptance is that of target-only sampling;
    no draft probabilities are needed.

    Args:
        logits, draft_tokens, trees, grammar_mask, draft_to_target: see `verify_greedy`.
        params: scalars, or tensors [B].
        seeds: int64 [B].
        positions: int64 [B], the roots' own positions; node n is sampled at positions[b] + depth(n).

    Returns a `Verdict`; status bit 2 where a visited row had NaN or no finite logit (such a row is uniform).

        node, depth = 0, 0
        while True:
            token = sample(logits[node], params, seed, position + depth)
            emit(node, token)
            node, depth = first child of node with draft_tokens[child] == token, depth + 1; else stop

    Sources: sampling the target alone, as SpecInfer's naive sampling does (Miao et al., 2023); Philox (Salmon et al.,
    SC 2011).

    Raises ValueError for wrong shapes, dtypes or devices, TypeError for wrong Python types.
    """
    expect_type("params", params, SamplingParams)
    return Verdict(
        *call(
            ops.verify_sampled,
            *_tree_arguments(logits, draft_tokens, trees),
            *params.on(logits.device),
            seeds=seeds,
            positions=positions,
            grammar_mask=grammar_mask,
            draft_to_target=draft_to_target,
        )
    )


def _tree_arguments(logits: Tensor, draft_tokens: Tensor, trees: TreeBatch) -> tuple[Any, ...]:
    """The leading arguments that the raw verify ops share."""
    expect_type("logits", logits, Tensor)
    expect_type("trees", trees, TreeBatch)
    return (
        logits,
        draft_tokens,
        trees.cu_nodes,
        trees.depths,
        trees.first_child,
        trees.next_sibling,
        trees.valid,
        trees.max_nodes,
        trees.max_depth,
    )


def _empty_verdict(logits: Tensor, cu_nodes: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = cu_nodes.shape[0] - 1
    return (
        logits.new_empty((batch, max_depth + 1), dtype=torch.int32),
        logits.new_empty((batch,), dtype=torch.int32),
        logits.new_empty((batch, max_depth + 1), dtype=torch.int64),
        logits.new_empty((batch,), dtype=torch.int32),
    )


@register_fake("verify_greedy")
def _verify_greedy_fake(
    logits: Tensor,
    draft_tokens: Tensor,
    cu_nodes: Tensor,
    depths: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    valid: Tensor,
    max_nodes: int,
    max_depth: int,
    *,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_verdict(logits, cu_nodes, max_depth)


@register_fake("verify_sampled")
def _verify_sampled_fake(
    logits: Tensor,
    draft_tokens: Tensor,
    cu_nodes: Tensor,
    depths: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    valid: Tensor,
    max_nodes: int,
    max_depth: int,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    filter_order: str,
    *,
    seeds: Tensor,
    positions: Tensor,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_verdict(logits, cu_nodes, max_depth)
