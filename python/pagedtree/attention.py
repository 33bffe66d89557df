"""Tree-masked attention over a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import expect_type
from pagedtree._ops import Prepared, call, has_no_values, ops, python_error, register_fake

__all__ = ["PreparedAttention", "attention_plan", "merge_states", "tree_attention"]

PLAN_SIZE = 3 * 16 * (1024 + 1)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    tree_mask: Tensor | None = None,
    *,
    tree_lens: Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of a ragged batch of queries over a paged KV cache, with a mask row per query.

    A batch may mix trees, chains, prefill chunks and plain decode. The queries' keys must already be in the cache.

    Args:
        q: [T, Hq, D], fp16, bf16 or fp32, last dimension contiguous; rows past cu_seqlens_q[-1] pad.
        k_cache: [pages, page_size, Hkv, D], any strides but a contiguous last dimension; q's dtype or float8_e4m3fn; Hq
            a multiple of Hkv, page_size >= 1. Query head h reads KV head h // (Hq // Hkv).
        v_cache: [pages, page_size, Hkv, Dv], likewise, of k_cache's dtype. Either D = Dv in 16, 32, 64, 96, 128, 192,
            256, 512, or (D, Dv) = (192, 128), or (576, 512). A view of k_cache's first Dv columns with Hkv = 1 makes
            the call *latent* (multi-head latent attention): each cached row is read once (on CUDA if Dv is 512).
        page_table: int32 [B, max_pages]; entries past ceil(seq_lens[b] / page_size) are never read. A page id outside
            the cache reads as zero K and V.
        seq_lens: int32 [B], all keys of a sequence, its queries' included; clamped to max_pages * page_size.
        cu_seqlens_q: int32 [B + 1], offsets of the sequences' queries, first 0.
        tree_mask: int32 [T, W], one row per query: bit j % 32 of word j // 32 = the query sees key seq_lens[b] -
            tree_lens[b] + j (`TreeBatch.mask`, `mask_words`). Any pattern is allowed; missing words are 0, bits at or
            past tree_lens[b] are ignored. None: every sequence is causal.
        tree_lens: int32 [B], how many of the last keys the mask covers; default the query lengths. With a larger value
            the queries are the newest level of a bigger tree. -1 = sequence b is causal and its mask rows are ignored.
            Clamped to -1..seq_lens[b]. Without a tree_mask it has no effect.
        max_seqlen_q: a hint for the choice of tiles, the most queries of a sequence, default ceil(T / B); it never
            changes the result. On CUDA, sequences of at most 32 rows (queries x Hq / Hkv) get small tiles if it is the
            maximum.
        scale: factor of q.k, default D ** -0.5. Latent attention needs the model's, of the size before absorption.
        softcap: > 0: scores are softcap * tanh(scale * q.k / softcap); not in a latent call.
        window: > 0: a query sees only keys whose position is less than `window` behind its own. A prefix key's position
            is its index; a tree node's is seq_lens - tree_lens + depth, where depth counts the set bits below the key's
            in the query's row; the query's own depth is the row's set bits - 1.
        sinks: fp32 [Hq], one more logit in each row's denominator.
        k_scale, v_scale: fp32 scalar or [Hkv], finite factors of an fp8 cache (others: unspecified results of their
            heads); v_scale's default in a latent call is k_scale.
        plan: of `attention_plan`; a plan for other lengths costs speed only, and the promise of its segment. A CUDA
            call writes to it and restores it: calls that share it run in stream order.
        out: [T, Hq, Dv] of q's dtype, written and returned; last dimension contiguous.
        return_lse: also return lse.

    Returns:
        out [T, Hq, Dv] of q's dtype, or (out, lse) with lse fp32 [T, Hq]: natural logarithm of the sum of exponentiated
        scores, the sink included. A row that sees no key gives out 0 and lse = its sink (-inf without sinks); padding
        rows give out 0 and lse -inf.

    Softmax and accumulation are fp32. On CUDA, fp32 queries and head sizes 16 and 32 are for tests: their kernel is
    exact rather than fast. Keys and values that are not finite change only rows that see them. Results are bitwise the
    same for any number of threads.

        for b, i, h in queries of each sequence and head:
            s, n = seq_lens[b], cu_seqlens_q[b + 1] - cu_seqlens_q[b]
            t = n if tree_lens is None else tree_lens[b]
            causal = tree_mask is None or t < 0
            sees = lambda j: j <= s - n + i if causal else j < s - t or bit(tree_mask[cu_seqlens_q[b] + i], j - (s - t))
            scores = {j: scale * q[b, i, h] @ K[b, j] for j in range(s) if sees(j) and in_window(j)}
            out = sum(exp(scores[j]) * V[b, j] for j in scores) / (sum(exp(scores)) + exp(sink[h]))

    Raises ValueError for wrong shapes, dtypes, devices, strides, a negative window or softcap, or a plan whose segment
    would take more than 1 GiB of scratch; with PAGEDTREE_CHECK=1 also for offsets, lengths and page ids out of range, a
    mask narrower than its trees and bits that are ignored.

    Sources: FlashAttention (Dao et al., 2022, 2023), FlashDecoding (key split), PagedAttention (Kwon et al., 2023),
    tree attention (SpecInfer, Miao et al., 2023), latent attention (DeepSeek-V2, 2024).
    """
    expect_type("q", q, Tensor)
    arguments = (q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, tree_mask)
    options = {
        "tree_lens": tree_lens,
        "max_seqlen_q": max_seqlen_q,
        "scale": scale,
        "softcap": softcap,
        "window": window,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "plan": plan,
    }
    if out is None:
        overload = ops.tree_attention.default if return_lse else ops.tree_attention.without_lse
        return call(overload, *arguments, **options)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    call(ops.tree_attention.out, *arguments, **options, out=out, lse=lse)
    return (out, lse) if lse is not None else out


class PreparedAttention:
    """A prepared `tree_attention` call: validates the shared arguments once per step, then runs for every layer.

        attend = PreparedAttention(page_table, seq_lens, cu_seqlens_q, tree_mask, tree_lens=tree_lens, plan=plan)
        for q, k_cache, v_cache in layers:
            out = attend(q, k_cache, v_cache)       # tree_attention(q, k_cache, v_cache, page_table, seq_lens, ...)

    Halves the host time of a call. Each call reads the current contents of the tensors passed here; new tensors need a
    new object. With gradients enabled or under compilation each call is a plain `tree_attention`: use `torch.no_grad`.

    Args: as for `tree_attention`. Without a plan each call makes one.

    Raises ValueError for wrong shapes, dtypes, devices, strides or a negative window or softcap.
    """

    def __init__(
        self,
        page_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        tree_mask: Tensor | None = None,
        *,
        tree_lens: Tensor | None = None,
        max_seqlen_q: int | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        window: int = 0,
        plan: Tensor | None = None,
    ) -> None:
        expect_type("page_table", page_table, Tensor)
        self._tensors = page_table, seq_lens, cu_seqlens_q, tree_mask
        self._options: dict[str, Any] = {
            "tree_lens": tree_lens,
            "max_seqlen_q": max_seqlen_q,
            "scale": scale,
            "softcap": softcap,
            "window": window,
            "plan": plan,
        }
        self._step: Prepared | None = None
        if not has_no_values(page_table):
            self._step = Prepared(call(ops._prepare_attention.default, *self._tensors, **self._options))

    def __reduce__(self) -> tuple[Any, ...]:
        return _prepared_again, (self._tensors, self._options)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention of one layer, out [T, Hq, Dv]. Arguments and errors are `tree_attention`'s."""
        if self._step is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            options = {**self._options, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "out": out}
            return tree_attention(q, k_cache, v_cache, *self._tensors, **options)  # type: ignore[return-value]
        layer = (q, k_cache, v_cache, self._step.number, sinks, k_scale, v_scale)
        try:
            if out is None:
                return _attend(*layer)
            _attend_out(*layer, out)
        except RuntimeError as error:
            raise python_error(error, _attend, layer, {}) from None
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return out


def _prepared_again(tensors: tuple[Any, ...], options: dict[str, Any]) -> PreparedAttention:
    return PreparedAttention(*tensors, **options)


_attend, _attend_out = ops._attend.default, ops._attend.out


def attention_plan(
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    max_seqlen_q: int,
    tree_lens: Tensor | None = None,
    head_dim_v: int | None = None,
    latent: bool = False,
    window: int = 0,
    segment: int | None = None,
) -> Tensor:
    """Cuts the work of `tree_attention` into ranges of equal cost, for all layers of a step that have the same window.

    Args:
        seq_lens, cu_seqlens_q, tree_lens: as for `tree_attention`; without tree_lens queries count as causal, which
            makes no difference to trees of up to 64 nodes.
        num_q_heads, num_kv_heads, head_dim, page_size: as in the planned calls; head_dim is K's.
        head_dim_v: V's, default head_dim. latent: whether the calls' v_cache is a view of k_cache.
        max_seqlen_q: the hint of the calls; on CUDA another hint means other tiles.
        window: the calls' window, 0: none. Models with two kinds of layers make two plans a step.
        segment: keys, a multiple of 64. The bits of a sequence's rows are then the same in every batch, at every place
            in it, with any padding, page numbers and threads, on one backend and engine, for the lengths that the plan
            was made for: cuts are at keys segment, 2 segment, ... of each sequence. None: off.

    Returns an int32 tensor of a fixed size (with a segment, segment / 64 longer) on the device of seq_lens, to pass as
    plan=; it does not depend on the mask or the dtype. A plan for another window, lengths or heads is correct but
    slower. An aborted call voids it.

    The price of a segment: a sequence with more keys writes and reads (Dv + 2) * 4 bytes for each row, head and
    segment; scratch is T * Hq * ceil(max_pages * page_size / segment) times that. A sequence of few segments keeps few
    CTAs or threads busy. CUDA takes two launches more.

    The order (sequence, row tile, key tile), as in Stream-K (Osama et al., 2023) and FlashMLA's scheduler, is cut into
    ranges of equal cost: one per visible key tile, plus a constant per piece of a row tile. The plan holds their
    starts.

    Raises ValueError for wrong shapes, dtypes, sizes or segment; with PAGEDTREE_CHECK=1 also for offsets that descend.
    """
    return call(
        ops.attention_plan,
        seq_lens,
        cu_seqlens_q,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_seqlen_q=max_seqlen_q,
        tree_lens=tree_lens,
        head_dim_v=head_dim_v,
        latent=latent,
        window=window,
        segment=segment,
    )


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention over two disjoint sets of keys into the result over their union.

    Args:
        out_a, out_b: [T, H, D], fp32, fp16 or bf16, the same dtype; any strides but a contiguous last dimension.
        lse_a, lse_b: fp32 [T, H], natural logarithms as `tree_attention` returns them. The out of a side of lse -inf is
            not read. Give sinks to one of the parts only.

        lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Sources: FlashDecoding (Dao et al., 2023), FlashInfer (Ye et al., 2025).

    Returns (out, lse); where both lse are -inf, out is 0 and lse -inf. Raises ValueError for wrong shapes or dtypes.
    """
    return call(ops.merge_states, out_a, lse_a, out_b, lse_b)


def _empty_out(q: Tensor, v_cache: Tensor, **others: object) -> Tensor:
    return q.new_empty((*q.shape[:2], v_cache.shape[-1]))


register_fake("tree_attention")(
    lambda q, v_cache, **others: (_empty_out(q, v_cache), q.new_empty(q.shape[:2], dtype=torch.float32))
)
register_fake("tree_attention.out")(lambda **others: None)
register_fake("tree_attention.without_lse")(_empty_out)
register_fake("attention_plan")(
    lambda seq_lens, segment=None, **others: seq_lens.new_empty(
        (PLAN_SIZE + (0 if segment is None else segment // 64),)
    )
)
register_fake("merge_states")(
    lambda out_a, lse_a, **others: (out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape))
)
