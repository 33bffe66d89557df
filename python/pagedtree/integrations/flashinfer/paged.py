"""FlashInfer's prefill wrapper over `tree_attention`."""

from __future__ import annotations

import math
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from pagedtree import attention_plan, tree_attention
from pagedtree._arguments import checked, expect_dims, expect_shape, refusal
from pagedtree.integrations.flashinfer.masks import import_custom_mask, import_packed_custom_mask
from pagedtree.integrations.flashinfer.pages import PagedKVCache, cache_views, page_table
from pagedtree.integrations.flashinfer.planning import TYPES, PlannedTypes, count_queries
from pagedtree.integrations.masks import all_visible

# Arguments of plan() that are only scheduling hints for FlashInfer, or redundant for pagedtree.
HINTS = {
    "rope_scale", "rope_theta", "non_blocking", "seq_lens", "seq_lens_q", "block_tables", "max_token_per_sequence",
    "max_sequence_kv", "fixed_split_size", "disable_split_kv", "uniform_q_len", "use_fp16_qk_reduction",
}  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's wrapper of this name: plan() once per step, run() in each layer.

    plan() reads lengths on the host. Masks must be tree masks (`import_custom_mask`).
    """

    def __init__(self, float_workspace_buffer: Tensor | None = None, kv_layout: str = "NHD", **options: Any) -> None:
        refused = sorted(name for name, value in options.items() if value and name != "backend")
        if refused:
            raise refusal(refused[0], "none", "one; attention_plan is captured instead", NotImplementedError)
        if kv_layout not in ("NHD", "HND"):
            raise refusal("kv_layout", '"NHD" or "HND"', repr(kv_layout))
        self._kv_layout = kv_layout
        self._arguments: dict[str, Any] | None = None

    @checked(integers=("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), one_device=False)
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Plans one step's batch. The arguments are FlashInfer's.

        Without a mask the queries see all keys, or the keys up to their own position if causal. Windows need causal. If
        q_data_type, kv_data_type and o_data_type are given, run() refuses others. head_dim_vo goes with a cache of two
        tensors, in the pairs that `tree_attention` takes. Raises NotImplementedError for unsupported arguments,
        ValueError for wrong shapes, offsets in qo_indptr that descend, and masks that are not tree masks.
        """
        if pos_encoding_mode != "NONE":
            raise refusal("pos_encoding_mode", '"NONE"', repr(pos_encoding_mode), NotImplementedError)
        self._types = PlannedTypes(*(options.pop(name, None) for name in TYPES))
        for name, value in options.items():
            if name not in HINTS and (isinstance(value, Tensor) or value):
                raise refusal(name, "none", type(value).__name__, NotImplementedError)
        device = paged_kv_indices.device  # the other tensors may be on the host
        expect_dims("[B + 1]", paged_kv_indptr=paged_kv_indptr)
        expect_dims("[pages]", paged_kv_indices=paged_kv_indices)
        expect_shape(paged_kv_indptr.shape, qo_indptr=qo_indptr)
        expect_shape([max(qo_indptr.numel() - 1, 0)], paged_kv_last_page_len=paged_kv_last_page_len)
        indptr, last_page_len = paged_kv_indptr.to(device), paged_kv_last_page_len.to(device)
        table, seq_lens = page_table(indptr, paged_kv_indices, last_page_len, page_size)
        self._num_queries, longest = count_queries(qo_indptr, seq_lens.numel())
        visible: dict[str, Tensor] = {}
        self._has_mask = packed_custom_mask is not None or custom_mask is not None
        if packed_custom_mask is not None:
            visible = {"tree_mask": import_packed_custom_mask(packed_custom_mask, None, qo_indptr, seq_lens)}
        elif custom_mask is not None:
            visible = {"tree_mask": import_custom_mask(custom_mask.flatten(), qo_indptr, seq_lens)}
        elif not causal:
            visible = all_visible(self._num_queries, seq_lens)
        offsets = qo_indptr.to(device, torch.int32)
        self._window_left = window_left
        self._arguments = {
            "page_table": table,
            "seq_lens": seq_lens,
            "cu_seqlens_q": offsets,
            **visible,
            "max_seqlen_q": max(longest, 1),
            "scale": sm_scale,
            "softcap": logits_soft_cap or 0.0,
        }
        self._arguments["plan"] = attention_plan(
            seq_lens,
            offsets,
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            head_dim_v=head_dim_vo,
            page_size=page_size,
            max_seqlen_q=max(longest, 1),
            tree_lens=visible.get("tree_lens"),
            window=window_left + 1,
        )

    @checked()
    def run(
        self, q: Tensor, paged_kv_cache: PagedKVCache, *args: Any, k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None,
        return_lse: bool = False, lse_base: str = "log2", lse_layout: str = "NH", window_left: int | None = None,
        sinks: Tensor | None = None, enable_pdl: bool | None = None, **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attends q [T, heads, dim] to the cache, given as `cache_views` takes it. Scales are an fp8 cache's.

        T is qo_indptr's last offset, or more if causal; rows after it get zeros. lse is fp32, in base 2 unless lse_base
        is "ln", [T, heads] unless lse_layout is "HN". Raises as `BatchMLAPagedAttentionWrapper.run` does.
        """
        if self._arguments is None:
            raise refusal("plan()", "to be called first", kind=RuntimeError)
        refused = sorted(name for name, value in options.items() if value is not None) or ["*args"] * bool(args)
        if refused:
            raise refusal(refused[0], "none", "one", NotImplementedError)
        for name, value, choices in (("lse_base", lse_base, ("log2", "ln")), ("lse_layout", lse_layout, ("NH", "HN"))):
            if value not in choices:
                raise refusal(name, f"one of {choices}", repr(value))
        num_queries, rows = self._num_queries, q.shape[0]
        if num_queries > rows:
            raise refusal("qo_indptr", f"at most {rows} queries, the rows of q", num_queries)
        window = self._window_left if window_left is None else window_left
        if window >= 0 and "tree_mask" in self._arguments:
            raise refusal("window_left", "-1 where the batch is not causal", window, NotImplementedError)
        scales = {name: _scale(x, q.device) for name, x in (("k_scale", k_scale), ("v_scale", v_scale))}
        views = cache_views(paged_kv_cache, self._kv_layout)
        self._types.check(q, views[0])
        arguments = {**self._arguments, **scales, "window": window + 1, "sinks": sinks, "out": out}
        result, lse_on_e = tree_attention(q, *views, **arguments, return_lse=True)
        if not return_lse:
            return result
        lse_on_e = lse_on_e / math.log(2) if lse_base == "log2" else lse_on_e
        lse_on_e = lse_on_e if lse_layout == "NH" else lse_on_e.T.contiguous()
        return result, lse_on_e if lse is None else lse.copy_(lse_on_e)

    run_return_lse = partialmethod(run, return_lse=True)
    begin_forward = plan

    def forward(
        self, q: Tensor, paged_kv_cache: PagedKVCache, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, k_scale: float | None = None, v_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """FlashInfer's older form of run(): these arguments override plan()'s."""
        if self._arguments is None:
            raise refusal("begin_forward()", "to be called first", kind=RuntimeError)
        if pos_encoding_mode != "NONE":
            raise refusal("pos_encoding_mode", '"NONE"', repr(pos_encoding_mode), NotImplementedError)
        arguments = self._arguments
        if not self._has_mask:
            arguments = {name: value for name, value in arguments.items() if name not in ("tree_mask", "tree_lens")}
            arguments |= {} if causal else all_visible(self._num_queries, arguments["seq_lens"])
        self._arguments = {**arguments, "scale": sm_scale, "softcap": logits_soft_cap or 0.0}
        return self.run(
            q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, window_left=window_left, return_lse=return_lse
        )

    forward_return_lse = partialmethod(forward, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing, as FlashInfer's."""


def _scale(value: float | Tensor | None, device: torch.device) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((1,), value, device=device, dtype=torch.float32)
