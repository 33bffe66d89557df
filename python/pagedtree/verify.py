"""Verification: which drafts of a tree the target model accepts, and the token it adds."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from pagedtree._arguments import expect_type, refusal
from pagedtree._ops import call, empty_verdict, ops, register_fake
from pagedtree.drafting import Draft
from pagedtree.options import RequestOptions, option_arguments
from pagedtree.sampling_params import SamplingParams
from pagedtree.tree import TreeBatch

if TYPE_CHECKING:
    from pagedtree.distributed.shards import VocabShards

__all__ = [
    "Verdict",
    "verify_block",
    "verify_greedy",
    "verify_rejection",
    "verify_sampled",
    "verify_tokens",
    "verify_traversal",
    "verify_typical",
]


class Verdict(NamedTuple):
    """The accepted path of each of B trees; S = trees.max_depth + 1.

    Attributes:
        accept_index: int32 [B, S], node ids of the path: the root's 0 first, then the accepted drafts, then -1.
        num_accepted: int32 [B], accepted draft tokens, without root and bonus.
        tokens: int64 [B, S], the accepted drafts, then at num_accepted[b] the bonus (the token that the target model
            adds), then -1.
        status: int32 [B], 0 or a sum of 1 (malformed tree) and 2 (a row that the walk read had NaN or no finite logit).

    A tree of no nodes (an idle sequence) gives only -1 in accept_index and tokens, num_accepted 0 and status 1
    (`TreeBatch.active` distinguishes it from a malformed tree). So does a sequence without tokens left, with its tree's
    status.
    """

    accept_index: Tensor
    num_accepted: Tensor
    tokens: Tensor
    status: Tensor


def verify_greedy(
    logits: Tensor,
    draft_tokens: Tensor | Draft,
    trees: TreeBatch | None = None,
    *,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
    shards: VocabShards | None = None,
) -> Verdict:
    """Follows the child that drafted the argmax, as long as there is one. Equals greedy decoding token for token.

    Args:
        logits: [N, V] float16, bfloat16 or float32, row stride >= V; row n is the target's prediction at node n. Only
            rows on the accepted path are read.
        draft_tokens: int32 or int64 [N], each node's token; the roots' are ignored, ids outside 0..V-1 are no drafts.
            Or a `Draft`, which has trees, draft_probs and draft_rows, too.
        trees: B trees; a malformed tree's reachable part is verified and its status bit 1 set.
        grammar_mask: bool [N, V] or packed int32 [N, ceil(V / 32)] (bit x % 32 of word x // 32): False reads as a logit
            of -inf.
        draft_to_target: int32 or int64 [V_draft], the target's ids of a draft vocabulary, whose ids draft_tokens then
            has; one outside 0..V_draft-1 is no draft.
        tokens_left: int32 [B], the most output tokens: the output is cut to such a prefix, empty at 0 or less.
        shards: the vocabulary's parts, of which logits and grammar_mask are this rank's (`pagedtree.distributed`).

    Returns a `Verdict`. Ties of logits take the lowest id, siblings with the same token the first. NaN reads as -inf; a
    row without finite logit gives id 0; either sets status bit 2.

        node = 0
        while True:
            emit(node, token := argmax(logits[node]))
            node = first child of node with draft_tokens[child] == token, else stop

    Sources: blockwise parallel decoding (Stern et al., NeurIPS 2018), for trees SpecInfer (Miao et al., 2023).

    Raises ValueError for wrong shapes, dtypes or devices, TypeError for wrong types.
    """
    options = {"grammar_mask": grammar_mask, "draft_to_target": draft_to_target, "tokens_left": tokens_left}
    return _verify("greedy", logits, draft_tokens, trees, shards=shards, **options)


def verify_sampled(
    logits: Tensor,
    draft_tokens: Tensor | Draft,
    trees: TreeBatch | SamplingParams | None = None,
    params: SamplingParams | None = None,
    *,
    seeds: Tensor,
    positions: Tensor,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
    options: RequestOptions | None = None,
    shards: VocabShards | None = None,
) -> Verdict:
    """Samples the target at each node of the path, and follows the child that drafted the sampled token.

    Lossless for any tree and any drafter: token for token, the output equals `sample` without drafts on the same
    logits, seeds and positions, whatever else is in the batch. Needs no draft probabilities.

    Args:
        logits, draft_tokens, trees, grammar_mask, draft_to_target, tokens_left, shards: see `verify_greedy`.
        params: scalars, or tensors [B]; after a `Draft` the third argument.
        seeds: int64 [B].
        positions: int32 or int64 [B], the roots' positions (`start`); node n is sampled at positions[b] + depth(n).
        options: the B requests' options; only rows on the path pay for them.

    Returns a `Verdict`; status bit 2 where a visited row had NaN or no finite logit (such a row is uniform).

        node, depth = 0, 0
        while True:
            token = sample(logits[node], params, seed, position + depth)
            emit(node, token)
            node, depth = first child of node with draft_tokens[child] == token, depth + 1; else stop

    Sources: target-only sampling, as SpecInfer's naive sampling (Miao et al., 2023); Philox (Salmon et al., SC 2011).

    Raises ValueError for wrong shapes, dtypes or devices, TypeError for wrong types.
    """
    return _verify(
        "sampled", logits, draft_tokens, trees, params, shards=shards, seeds=seeds, positions=positions,
        grammar_mask=grammar_mask, draft_to_target=draft_to_target, tokens_left=tokens_left, options=options,
    )  # fmt: skip


def verify_rejection(
    logits: Tensor,
    draft_tokens: Tensor | Draft,
    trees: TreeBatch | SamplingParams | None = None,
    params: SamplingParams | None = None,
    *,
    draft_law: str,
    draft_probs: Tensor | None = None,
    draft_rows: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    coins: Tensor | None = None,
    final_coins: Tensor | None = None,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
    draft_params: SamplingParams | None = None,
    options: RequestOptions | None = None,
    shards: VocabShards | None = None,
    max_children: int | None = None,
) -> Verdict:
    """Verifies trees by rejection sampling, with draft probabilities for a higher acceptance rate.

    Lossless (the tokens follow the target's distribution exactly) if the drafts were chosen as `draft_law` states, and
    not dropped or reordered after drawing.

    Args:
        logits, draft_tokens, trees, grammar_mask, draft_to_target, tokens_left, shards: see `verify_greedy`.
        params, seeds, positions, options: see `verify_sampled`.
        draft_law: how the children of a node were chosen, in index order.
            "iid": drawn independently from q_n; tokens may repeat.
            "swor": drawn from q_n without replacement (a repeated token is rejected).
            "onehot": chosen without this op's random numbers (top-k, EAGLE-2, n-gram); a repeated token counts once.
        draft_probs: [M, V] float16, bfloat16 or float32, row stride >= V, over the target's ids; the distributions q_n
            for "iid" and "swor", None for "onehot". Entries that are not positive and finite read as 0.
        draft_rows: int32 or int64 [N], the row of q_n in draft_probs; default n. Children of a row outside 0..M-1 are
            rejected.
        coins: float32 [N] in [0, 1), the u of each child ("iid", "swor") or of each parent ("onehot"). Default: Philox
            of seeds[b], positions[b] + depth of that node, and the child's rank.
        final_coins: float32 [B] in [0, 1), the u of the bonus. Default: Philox, at the last node's position.
        draft_params: draft_probs then holds logits, whose distribution under these parameters (no penalties) is q_n;
            not with shards, where draft_probs may be whole or this rank's columns.
        max_children: with shards, the most children of a node, 0..1023; default: read from the trees (synchronises).

    Returns a `Verdict`; status bit 2 where a visited row of logits had NaN or no finite logit.

        node = 0
        while True:
            p, q = distribution(logits[node], params), draft_probs[draft_rows[node]]
            for x, u in drafts and coins of node's children:            # "iid", "swor"
                if q[x] > 0 and u * q[x] < p[x]: accept x
                p = normalise(max(p - q, 0))
                if draft_law == "swor": q[x] = 0; q = normalise(q)
            for x in drafts of node's children, the coin u being node's: # "onehot"
                if p[x] > 0 and u < sum(p of distinct drafts so far): accept x
            # and p of the children is 0 if none is accepted
            if x was accepted: emit(node, x); node = child with x
            else: emit(node, first x with cdf(x) > u_final, in id order, of p), stop   # of p_n if nothing is left of p

    Sums are fp32 within blocks of 1024 tokens and double across blocks, in a fixed order: results do not depend on
    batch, slot, threads or instruction set. A residual below 1e-6 of p_n (rounding) counts as nothing.

    Sources: Leviathan et al., ICML 2023 (chains); SpecInfer, ASPLOS 2024 ("iid"); Sequoia, NeurIPS 2024 ("swor").

    Raises ValueError for wrong shapes, dtypes or devices, for draft_probs or draft_params under "onehot", and without
    draft_probs elsewhere; TypeError for wrong types.
    """
    return _verify(
        "rejection", logits, draft_tokens, trees, params, draft_law=draft_law, draft_probs=draft_probs,
        draft_rows=draft_rows, seeds=seeds, positions=positions, coins=coins, final_coins=final_coins,
        grammar_mask=grammar_mask, draft_to_target=draft_to_target, tokens_left=tokens_left,
        draft_params=draft_params, options=options,
        shards=shards, max_children=max_children,
    )  # fmt: skip


def verify_block(
    logits: Tensor,
    draft_tokens: Tensor | Draft,
    trees: TreeBatch | SamplingParams | None = None,
    params: SamplingParams | None = None,
    *,
    draft_law: str,
    draft_probs: Tensor | None = None,
    draft_rows: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    coins: Tensor | None = None,
    final_coins: Tensor | None = None,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
    draft_params: SamplingParams | None = None,
    options: RequestOptions | None = None,
) -> Verdict:
    """Verifies chains as blocks: judges prefixes by their joint probability. Lossless for the named `draft_law`.

    Accepts at least as many drafts on average as `verify_rejection`, equally many under "onehot". Acceptance depends on
    later drafts, too, so every step needs fresh random numbers for drafting (`expand_tree`: other seeds each step).

    Args:
        trees: B chains. A node with two children sets status bit 1, and only first children are followed; a chain ends
            before its first id outside 0..V-1.
        draft_law: "iid" or "swor", the same on a chain, or "onehot".
        coins: float32 [N] in [0, 1), the u of each draft. Default: Philox of seeds[b], positions[b] and the node.
        final_coins: float32 [B] in [0, 1). Default: Philox, at the last accepted node's position.
        The others: see `verify_rejection`.

    Returns a `Verdict`. With drafts x_1..x_k, and distributions p_i, q_i at node i:

        w_0 = 1;  w_i = min(1, w_(i-1) * p_(i-1)[x_i] / q_(i-1)[x_i])              # 0 where q is not positive
        z_i = sum(max(w_i * p_i - q_i, 0))
        h_i = z_i / (z_i + 1 - w_i) for i < k, h_k = w_k                            # 0 / 0 is 1
        n = the largest i with coins[i] < h_i, else 0
        emit x_1..x_n, then from max(w_n * p_n - q_n, 0), or from p_n if n == k or nothing is left

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025.

    Raises as `verify_rejection`; with PAGEDTREE_CHECK=1 also for trees that are not chains.
    """
    return _verify(
        "block", logits, draft_tokens, trees, params, draft_law=draft_law, draft_probs=draft_probs,
        draft_rows=draft_rows, seeds=seeds, positions=positions, coins=coins, final_coins=final_coins,
        grammar_mask=grammar_mask, draft_to_target=draft_to_target, tokens_left=tokens_left,
        draft_params=draft_params, options=options,
    )  # fmt: skip


def verify_traversal(
    logits: Tensor,
    draft_tokens: Tensor | Draft,
    trees: TreeBatch | SamplingParams | None = None,
    params: SamplingParams | None = None,
    *,
    draft_law: str,
    draft_probs: Tensor | None = None,
    draft_rows: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    coins: Tensor | None = None,
    final_coins: Tensor | None = None,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
    draft_params: SamplingParams | None = None,
    options: RequestOptions | None = None,
) -> Verdict:
    """Verifies trees by traversal: leaves first, judged by the joint probability of their paths.

    Lossless if the drafts were drawn by `draft_law` "iid" or "swor", independently from node to node: random numbers
    shared by the nodes of a level bias the output. On average it accepts at least as many drafts as `verify_rejection`;
    on a chain it is `verify_block`. Every step must draw fresh drafts, as for `verify_block`.

    Args:
        coins, final_coins: see `verify_block`. The others: see `verify_rejection`; draft_law "onehot" is refused.

    Returns a `Verdict`. From verify(root, 1), the root being accepted whatever its coin:

        def verify(node, w):
            p, q = distribution(logits[node], params), draft_probs[draft_rows[node]]
            for x in drafts of node's children:
                if verify(child with x, min(1, w * p[x] / q[x])): return True           # 0 where q is not positive
                z = sum(max(w * p - q, 0))
                p = normalise(max(w * p - q, 0))
                w = z / (z + 1 - w)                                                     # 0 / 0 is 1
                if draft_law == "swor": q[x] = 0; q = normalise(q)
            if coins[node] < w: emit the path, then from p (from p_n if nothing is left); return True

    Source: Weng et al., "Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398.

    Raises as `verify_rejection`, and ValueError for draft_law "onehot".
    """
    return _verify(
        "traversal", logits, draft_tokens, trees, params, draft_law=draft_law, draft_probs=draft_probs,
        draft_rows=draft_rows, seeds=seeds, positions=positions, coins=coins, final_coins=final_coins,
        grammar_mask=grammar_mask, draft_to_target=draft_to_target, tokens_left=tokens_left,
        draft_params=draft_params, options=options,
    )  # fmt: skip


def verify_typical(
    logits: Tensor,
    draft_tokens: Tensor | Draft,
    trees: TreeBatch | SamplingParams | None = None,
    params: SamplingParams | None = None,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
) -> Verdict:
    """Verifies by typical acceptance: takes the longest path of sufficiently likely drafts, then an argmax.

    Not lossless: drafts are favoured, and nothing is random.

    Args:
        logits, draft_tokens, trees, grammar_mask, draft_to_target, tokens_left: see `verify_greedy`.
        params: scalars, or tensors [B]; no penalties.
        epsilon: in 0..1, a sufficient probability. delta: >= 0, a factor of exp(-entropy), which also suffices.

    Returns a `Verdict`; status bit 2 where a visited row had NaN or no finite logit. H is the entropy in nats:

        accepted = {root} and each node of draft x under an accepted parent n with
                   p_n[x] > min(epsilon, delta * exp(-H(p_n)))
        leaf = the deepest accepted node, the first of several
        emit the path to leaf, then argmax p_leaf

    Source: Cai et al., "Medusa", ICML 2024.

    Raises ValueError for wrong shapes, dtypes or devices, epsilon or delta out of range; TypeError for wrong types.
    """
    options = {"grammar_mask": grammar_mask, "draft_to_target": draft_to_target, "tokens_left": tokens_left}
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise refusal(name, "a number", repr(value), TypeError)
    bounds = {"epsilon": float(epsilon), "delta": float(delta)}
    return _verify("typical", logits, draft_tokens, trees, params, **bounds, **options)


def verify_tokens(
    tokens: Tensor,
    draft_tokens: Tensor | Draft,
    trees: TreeBatch | None = None,
    *,
    draft_to_target: Tensor | None = None,
    tokens_left: Tensor | None = None,
) -> Verdict:
    """Follows the child that drafted the target's token, which any sampler gave: a fused output layer, an engine's own.

    Lossless where the law of a node's token, given its path, is the target's; noise shared with the drafter is allowed.
    With `sample`'s tokens of all nodes (each node's seed its sequence's, its position the root's plus its depth, no
    options of the path) the verdict is verify_sampled's, with argmax's verify_greedy's. Ranks have whole tokens.

    Args:
        tokens: int32 or int64 [N]; tokens[n] follows node n. Ids have no upper bound.
        draft_tokens: int32 or int64 [N], each node's token; the roots' are ignored, negative ids are no drafts. Or a
            `Draft`.
        trees, draft_to_target, tokens_left: see `verify_greedy`.

    Returns a `Verdict`. Siblings with the same token take the first. A negative token ends the path: it comes out as -1
    and sets status bit 2.

        node = 0
        while True:
            emit(node, tokens[node])
            node = first child of node with draft_tokens[child] == tokens[node] >= 0, else stop

    Source: SGLang's `verify_tree_greedy`, which takes the target's tokens.

    Raises ValueError for wrong shapes, dtypes or devices, TypeError for wrong types.
    """
    options = {"draft_to_target": draft_to_target, "tokens_left": tokens_left}
    return _verify("tokens", tokens, draft_tokens, trees, **options)


def _verify(
    rule: str, rows: Tensor, draft: Any, trees: Any, params: Any = None, *, shards: Any = None, **given: Any
) -> Verdict:
    """Calls the op of a rule, or its form on shards. given: the op's other arguments."""
    op, has_params = f"verify_{rule}", rule not in ("greedy", "tokens")
    expect_type("tokens" if rule == "tokens" else "logits", rows, Tensor)
    if isinstance(draft, Draft):
        if has_params and params is None and isinstance(trees, SamplingParams):
            trees, params = None, trees
        parts = {name: getattr(draft, name) for name in ("draft_probs", "draft_rows") if name in given}
        for name, value in [("trees", trees), *((name, given[name]) for name in parts)]:
            if value is not None:
                raise refusal(name, "None with a Draft, which has it", type(value).__name__)
        draft, trees, given = draft.draft_tokens, draft.trees, given | parts
    elif trees is None:
        raise refusal("draft_tokens", "a Draft without trees", type(draft).__name__, TypeError)
    expect_type("trees", trees, TreeBatch)
    if has_params:
        expect_type("params", params, SamplingParams)
    if shards is not None:
        from pagedtree.distributed.verify import verify_shards

        return Verdict(*verify_shards(rule, shards, rows, draft, trees, params, **given))
    if given.pop("max_children", None) is not None:
        raise refusal("max_children", "None without shards", "an integer")
    sampling: tuple[Any, ...] = ()
    if params is not None:
        sampling = params.on(rows.device)
        if rule == "typical":
            params.expect_no_penalty()
        else:
            options = option_arguments(params, given.pop("options"), rows.device)
            given |= {"parents": trees.parents, **options}
    draft_params = given.pop("draft_params", None)
    if draft_params is not None:
        expect_type("draft_params", draft_params, SamplingParams)
        draft_params.expect_no_penalty("draft_params")
        names = ("temperature", "top_k", "top_p", "min_p", "filter_order")
        values = zip(names, draft_params.on(rows.device), strict=True)
        given |= {f"draft_{name}": value for name, value in values}
    fields = (trees.cu_nodes, trees.depths, trees.first_child, trees.next_sibling, trees.valid)
    return Verdict(*call(getattr(ops, op), rows, draft, *fields, trees.max_nodes, trees.max_depth, *sampling, **given))


for _name in (name for name in __all__ if name.startswith("verify_")):
    register_fake(_name)(empty_verdict)
