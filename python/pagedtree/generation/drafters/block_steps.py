"""Parts of a block drafter that need several ops: block windows, and trees of a selector's scores."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import Draft, append_kv, expand_tree, merge_states, rerank_tree, start_draft, tree_attention
from pagedtree.bits import packed
from pagedtree.generation.drafters.block_model import CandidateSelector
from pagedtree.generation.drafters.grown import chosen_scores
from pagedtree.generation.paged_step import PagedStep


def attend_in_parts(step: PagedStep, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, around: int) -> Tensor:
    """Computes attention of blocks with windows that the op's masks cannot express: the op covers the text and part of
    the block, and the rest is merged. Either `window` or `around` is 0.

    step: the causal pass of whole blocks. window: of a causal layer; it ends this far before each block, whose earlier
    tokens are all visible. around: of a non-causal layer, to both sides of each token.
    """
    size, batch = step.max_seqlen_q, step.seq_lens.shape[0]
    k_cache, v_cache = step.cache.layer(layer, k, v)
    assert v_cache is not None  # not a latent cache
    append_kv(k, v, k_cache, v_cache, step.slots)
    place = torch.arange(size, device=q.device, dtype=torch.int64)
    distance = place[:, None] - place
    mask, tree_lens = None, None
    if window:  # the op covers the text and the token itself, with the whole block at one position
        diagonal = packed(distance == 0)
        mask, tree_lens = diagonal.repeat(batch, 1), torch.full_like(step.seq_lens, size)
        rest = distance > 0
    else:  # the op covers everything up to the token
        rest = (distance < 0) & (distance > -around)
    out, lse = tree_attention(
        q,
        k_cache,
        v_cache,
        step.page_table,
        step.seq_lens,
        step.cu_seqlens_q,
        mask,
        tree_lens=tree_lens,
        max_seqlen_q=size,
        window=window + 1 if window else around,
        return_lse=True,
    )
    return merge_states(out, lse, *_within_blocks(q, k, v, size, rest))[0]


def _within_blocks(q: Tensor, k: Tensor, v: Tensor, size: int, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Returns attention within blocks of `size` tokens, and its log-sum-exp. visible: bool [size, size]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~visible, 0.0)
    return (weights @ v).transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def selected_trees(
    selector: CandidateSelector, roots: Tensor, states: Tensor, logits: Tensor, num_nodes: int, width: int
) -> tuple[Draft, Tensor]:
    """Returns trees of the likeliest children under a selector, and the nodes' joint log-probabilities. roots: int64
    [B]. states [B, depth, H], logits [B, depth, V]: of the places after them. The `width` best nodes of a level have
    children, at most `width` each."""
    batch, depth = logits.shape[:2]
    num_tokens = selector.successor_codebook.shape[0]  # the target may have padding after these tokens
    logits = logits[..., :num_tokens]
    unary, candidates = logits.topk(min(selector.top_k, logits.shape[-1]), dim=-1)
    width = min(width, unary.shape[-1])
    # Levels have different candidates: a candidate's index within its level replaces its token.
    state = start_draft(torch.zeros_like(roots), max_kv_nodes=1 + width * (depth - 1))
    before = roots[:, None].clamp(max=num_tokens - 1)
    for level in range(depth):
        scores = selector(states[:, level], before, candidates[:, level], unary[:, level])
        num_frontier = min(width, state.num_frontier * width) if level + 1 < depth else 0
        state = expand_tree(state, scores.flatten(0, 1), num_children=width, num_frontier=num_frontier)
        if num_frontier:
            before = candidates[:, level].gather(1, state.level_tokens.view(batch, -1))
    draft = rerank_tree(state, num_nodes)
    trees = draft.trees
    rows = torch.arange(len(draft.draft_tokens), device=roots.device, dtype=torch.int64)
    tree = torch.searchsorted(trees.cu_nodes[1:].long(), rows, right=True).clamp(max=batch - 1)
    place = (trees.depths.long() - 1).clamp(min=0)
    tokens = candidates[tree, place, draft.draft_tokens.clamp(min=0)]
    return Draft(tokens, trees), chosen_scores(state.scores, num_nodes)
