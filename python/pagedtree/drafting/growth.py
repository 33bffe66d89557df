"""Trees grown by a draft model, level by level (EAGLE-2, drawn children)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import expect_type, refusal
from pagedtree._ops import call, ops, register_fake
from pagedtree.drafting.draft import Draft
from pagedtree.sampling_params import SamplingParams
from pagedtree.tree import build_trees

__all__ = ["DraftState", "expand_tree", "rerank_tree", "start_draft"]


@dataclass(frozen=True)
class DraftState:
    """A batch of growing draft trees. Each step returns a new one; shapes depend only on Python ints.

    Every expansion adds K children of each of the F frontier nodes, in frontier order. Some become the next frontier,
    the draft model's next inputs, and take the next F places in its KV tree, present or not.

    Attributes:
        tokens: int64 [B, C], -1 where absent.
        parents: int32 [B, C], candidate index; -1 at the root (index 0).
        scores: fp32 [B, C], cumulative log-probability of the path, 0 at the root, -inf where absent.
        kv_index: int32 [B, C], index among the draft model's KV nodes (the root's is 0), -1 where not fed (yet).
        frontier: int32 [B, F], candidates whose logits `expand_tree` takes next.
        mask: int32 [B * F, W], the KV nodes that a frontier node sees: its ancestors and itself; empty where absent.
        level_sizes: candidates per level, summing to C.
        num_kv: the draft model's KV nodes, this frontier included; max_kv_nodes: their bound, as in `start_draft`.
        law: "topk", "iid", "swor" or "coupled"; None before the first expansion.
        draft_probs: one fp32 [B, F, V] per level (laws "iid" and "swor").

    docs/integration.md shows the draft model's pass over a frontier.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    kv_index: Tensor
    frontier: Tensor
    mask: Tensor
    level_sizes: tuple[int, ...]
    num_kv: int
    max_kv_nodes: int
    law: str | None = None
    draft_probs: tuple[Tensor, ...] = ()

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_candidates(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_frontier(self) -> int:
        return self.frontier.shape[1]

    @property
    def level(self) -> int:
        return len(self.level_sizes) - 1

    @property
    def depths(self) -> Tensor:
        """int32 [B, C]: a candidate's depth; the root's is 0."""
        levels = [self.parents.new_full((self.batch_size, size), depth) for depth, size in enumerate(self.level_sizes)]
        return torch.cat(levels, dim=1)

    @property
    def level_tokens(self) -> Tensor:
        """int64 [B * F]: the frontier's tokens, 0 where absent."""
        return self.tokens.gather(1, self.frontier.long()).clamp(min=0).flatten()

    @property
    def level_present(self) -> Tensor:
        """bool [B * F]: False where the frontier has no node."""
        return (self.scores.gather(1, self.frontier.long()) > -torch.inf).flatten()

    def level_positions(self, start: Tensor) -> Tensor:
        """Returns int64 [B * F]: the frontier's positions, start + depth. start: int32 or int64 [B], root positions."""
        return (start.long() + self.level)[:, None].expand(-1, self.num_frontier).flatten()

    @property
    def level_mask(self) -> Tensor:
        """int32 [B * F, W]: rectangular mask rows over the draft model's KV nodes, for `tree_attention`."""
        return self.mask

    @property
    def level_tree_lens(self) -> Tensor:
        """int32 [B]: KV nodes of each sequence's tree, this level's and absent ones included."""
        return self.parents.new_full((self.batch_size,), self.num_kv)

    @property
    def cu_seqlens_q(self) -> Tensor:
        """int32 [B + 1]: F queries per sequence."""
        return torch.arange(self.batch_size + 1, dtype=torch.int32, device=self.tokens.device) * self.num_frontier


def start_draft(root_tokens: Tensor, *, max_kv_nodes: int, active: Tensor | None = None) -> DraftState:
    """Returns trees of one node each, the root, which is the frontier.

    Args:
        root_tokens: int64 [B], the last committed tokens.
        max_kv_nodes: bound on the nodes that the draft model reads (the root and all frontiers), 1..1024; fixes the
            mask's width.
        active: bool [B]; False: all nodes are absent.

    Raises ValueError for wrong shapes, dtypes or bounds.
    """
    expect_type("root_tokens", root_tokens, Tensor)
    if active is not None:
        expect_type("active", active, Tensor)
    if root_tokens.dtype != torch.int64 or root_tokens.dim() != 1:
        raise refusal("root_tokens", "int64 [B]", f"{root_tokens.dtype} {list(root_tokens.shape)}")
    if isinstance(max_kv_nodes, bool) or not isinstance(max_kv_nodes, int):
        raise refusal("max_kv_nodes", "an int", type(max_kv_nodes).__name__, TypeError)
    if not 1 <= max_kv_nodes <= 1024:
        raise refusal("max_kv_nodes", "1..1024", max_kv_nodes)
    if active is not None and (active.dtype != torch.bool or active.shape != root_tokens.shape):
        raise refusal("active", "bool [B]", f"{active.dtype} {list(active.shape)}")
    if active is not None and active.device != root_tokens.device:
        raise refusal("active", root_tokens.device, active.device)
    batch = root_tokens.shape[0]
    present = torch.ones_like(root_tokens, dtype=torch.bool) if active is None else active
    mask = torch.zeros((batch, (max_kv_nodes + 31) // 32), dtype=torch.int32, device=root_tokens.device)
    mask[:, 0] = present
    return DraftState(
        tokens=torch.where(present, root_tokens, -1)[:, None],
        parents=mask.new_full((batch, 1), -1),
        scores=torch.full_like(root_tokens, -torch.inf, dtype=torch.float32).masked_fill(present, 0.0)[:, None],
        kv_index=mask.new_full((batch, 1), -1),
        frontier=mask.new_zeros((batch, 1)),
        mask=mask,
        level_sizes=(1,),
        num_kv=1,
        max_kv_nodes=max_kv_nodes,
    )


def expand_tree(
    state: DraftState,
    logits: Tensor,
    *,
    num_children: int,
    num_frontier: int = 0,
    law: str = "topk",
    params: SamplingParams | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> DraftState:
    """Grows each tree by one level: `num_children` children of every frontier node, then the next frontier.

    Sources: EAGLE-2 (Li et al., EMNLP 2024) for "topk"; "swor" draws by Gumbel-top-k (Kool et al., ICML 2019); the
    shared noise of "coupled" is Daliri et al., 2024.

    Args:
        state: from `start_draft` or an earlier expansion.
        logits: fp32, fp16 or bf16 [B * F, V], the draft model's at the frontier; row stride >= V.
        num_children: K, 1..1024, and at most V except under "iid".
        num_frontier: size of the next frontier, at most F * K; 0 (default) after the last level.
        law: how children are chosen on all levels; the draft_law of `verify_rejection` ("topk" is its "onehot";
            "coupled" is for `verify_sampled` alone).
            "topk": the K best tokens, best first, ties by lower id.
            "swor": K draws without replacement from q, in the order of the draws.
            "iid": K independent draws from q; a token may repeat.
            "coupled": as "swor", with the noise of `verify_sampled` at the node for the same seeds and positions.
        params, seeds, positions: for all laws but "topk": q is the distribution of `params` (scalars or [B]) on the
            row; seeds int64 [B]; positions int32 or int64 [B], the roots' own. The noise depends on the seed and the
            node's position, positions + depth. For "swor" and "iid" it differs from all verification noise and between
            nodes: their draws are independent, as `verify_traversal` requires.

    NaN logits read as -inf, +inf as the largest finite. A child is absent (token -1, score -inf) if its node is absent,
    its logit is -inf ("topk"), or q has fewer than K tokens ("swor", "coupled").

        for f in frontier:
            logp = log_softmax(logits[f])               # "topk"; else log q
            for token in topk(logp, num_children):      # else num_children draws from q
                append(token, parent=f, score=score[f] + logp[token])
        frontier = sorted(new, key=lambda c: (-score[c], c))[:num_frontier]

    For all laws but "topk" the frontier takes the first child of every old frontier node, then the second of each, ...:
    a choice by score would bias verification. The state keeps the distributions q of "swor" and "iid", fp32 [B, F, V]
    (zeros for an absent node).

    Raises ValueError for wrong shapes, dtypes or bounds, sampling arguments that do not fit the law, and another law
    than the state's.
    """
    expect_type("state", state, DraftState)
    expect_type("logits", logits, Tensor)
    if state.law not in (None, law):
        raise refusal("law", f"{state.law!r} as in the levels before", repr(law))
    if law in ("iid", "swor", "coupled") and params is None:
        raise refusal("params", f"SamplingParams under law {law!r}", "None")
    room = state.max_kv_nodes - state.num_kv
    are_ints = isinstance(num_frontier, int) and isinstance(num_children, int)  # else the op refuses them
    if are_ints and room < num_frontier <= state.num_frontier * num_children:
        expected = f"at most {room} (max_kv_nodes less those fed)"
        raise refusal("num_frontier", expected, num_frontier)
    sampling: tuple[Tensor | str | None, ...] = (None, None, None, None, "top_k_first")
    if params is not None:
        expect_type("params", params, SamplingParams)
        params.expect_no_penalty()
        sampling = params.on(logits.device)
    tokens, parents, scores, kv_index, frontier, mask, draft_probs = call(
        ops.expand_tree,
        state.tokens,
        state.parents,
        state.scores,
        state.kv_index,
        state.frontier,
        state.mask,
        logits,
        level=state.level,
        num_kv=state.num_kv,
        num_children=num_children,
        num_frontier=num_frontier,
        law=law,
        **dict(zip(("temperature", "top_k", "top_p", "min_p", "filter_order"), sampling, strict=True)),
        seeds=seeds,
        positions=positions,
    )
    keeps_probs = law in ("iid", "swor")
    probs = (draft_probs.view(state.batch_size, state.num_frontier, logits.shape[1]),) if keeps_probs else ()
    return DraftState(
        tokens,
        parents,
        scores,
        kv_index,
        frontier,
        mask,
        level_sizes=(*state.level_sizes, state.num_frontier * num_children),
        num_kv=state.num_kv + num_frontier,
        max_kv_nodes=state.max_kv_nodes,
        law=law,
        draft_probs=(*state.draft_probs, *probs),
    )


def rerank_tree(state: DraftState, num_nodes: int, *, active: Tensor | None = None) -> Draft:
    """Chooses each sequence's draft tree among its candidates: the root and the best num_nodes - 1 of all levels.

    Source: EAGLE-2 (Li et al., EMNLP 2024).

    Args:
        state: the grown trees.
        num_nodes: most nodes of a tree, root included, 1..1024.
        active: bool [B]; False: a tree of no nodes.

    Law "topk": the best have the highest cumulative log-probability, ties by depth, then index. Nodes keep the
    candidates' order.

        best = sorted(present, key=lambda c: (-score[c], c))[:num_nodes]
        nodes = sorted(best)

    Under the other laws the tree is the candidates present among the first num_nodes. Under "swor" and "iid"
    draft_probs holds every distribution drawn from, copied into one tensor [B * nodes expanded, V], and draft_rows maps
    each node to its children's distribution.

    Returns a `Draft` with max_nodes = num_nodes and max_depth = the levels expanded. Raises ValueError for wrong
    shapes, dtypes or bounds.
    """
    expect_type("state", state, DraftState)
    draft_tokens, parents, cu_nodes, node_map = call(
        ops.rerank_tree,
        state.tokens,
        state.parents,
        state.scores,
        state.kv_index,
        num_nodes=num_nodes,
        by_score=state.law in (None, "topk"),
        active=active,
    )
    trees = build_trees(parents, cu_nodes, max_nodes=num_nodes, max_depth=state.level)
    if not state.draft_probs:
        return Draft(draft_tokens, trees, node_map=node_map)
    draft_probs = torch.cat(state.draft_probs, dim=1)
    rows = torch.arange(node_map.shape[0], dtype=torch.int32, device=node_map.device)
    sequence = torch.searchsorted(cu_nodes[1:], rows, right=True)
    draft_rows = sequence * draft_probs.shape[1] + node_map.clamp(min=0)
    draft_rows = draft_rows.clamp(max=draft_probs.shape[0] * draft_probs.shape[1] - 1)  # of padding
    return Draft(draft_tokens, trees, draft_probs.flatten(0, 1), draft_rows, node_map)


@register_fake("expand_tree")
def _expand_tree_fake(
    frontier: Tensor, mask: Tensor, logits: Tensor, num_children: int, num_frontier: int, law: str = "topk", **of: Any
) -> tuple[Tensor, ...]:
    batch, size = of["tokens"].shape
    shape = (batch, size + frontier.shape[1] * num_children)
    return (
        *(of[name].new_empty(shape) for name in ("tokens", "parents", "scores", "kv_index")),
        frontier.new_empty((batch, num_frontier)),
        mask.new_empty((batch * num_frontier, mask.shape[1])),
        of["scores"].new_empty((0 if law == "topk" else logits.shape[0], logits.shape[1])),
    )


@register_fake("rerank_tree")
def _rerank_tree_fake(tokens: Tensor, parents: Tensor, num_nodes: int, **others: object) -> tuple[Tensor, ...]:
    batch = tokens.shape[0]
    rows = (batch * num_nodes,)
    return tokens.new_empty(rows), *(parents.new_empty(shape) for shape in (rows, (batch + 1,), rows))
