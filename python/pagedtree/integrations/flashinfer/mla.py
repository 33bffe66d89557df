"""FlashInfer's wrapper for latent caches (MLA) over `tree_attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pagedtree import tree_attention
from pagedtree._arguments import checked, expect_dims, expect_shape, refusal
from pagedtree.integrations.flashinfer.pages import page_table as tables
from pagedtree.integrations.flashinfer.planning import PlannedTypes, count_queries
from pagedtree.integrations.masks import all_visible

# Arguments that have no effect on the result: run() takes tensors in one part and in two, whatever plan() was told.
HINTS = {"backend", "use_profiler", "query_layout", "kv_cache_layout", "enable_pdl"}


class BatchMLAPagedAttentionWrapper:
    """FlashInfer's wrapper of this name: plan() once per step, run() in each layer; the rest is refused by name."""

    def __init__(self, float_workspace_buffer: Tensor | None = None, **options: Any) -> None:
        _refuse(options)
        self._arguments: dict[str, Any] | None = None

    @checked(integers=("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), one_device=False)
    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int,
        head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
        q_data_type: torch.dtype | None = None, kv_data_type: torch.dtype | None = None, use_profiler: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """Plans one step's batch. The arguments are FlashInfer's, in its flat form; lengths are read on the host.

        Raises NotImplementedError for unsupported arguments (such as metadata=), ValueError for wrong shapes, and for
        widths other than 512 and 64.
        """
        output = options.pop("output_dtype", None)
        _refuse({name: value for name, value in options.items() if value not in ("none", "default")})
        if (head_dim_ckv, head_dim_kpe) != (512, 64):
            raise refusal("head_dim_ckv, head_dim_kpe", "512 and 64", f"{head_dim_ckv} and {head_dim_kpe}")
        device = kv_indices.device  # the other tensors may be on the host
        expect_dims("[B + 1]", kv_indptr=kv_indptr)
        expect_dims("[pages]", kv_indices=kv_indices)
        num_queries, longest = count_queries(qo_indptr, kv_indptr.numel() - 1)
        expect_shape([kv_indptr.numel() - 1], kv_len_arr=kv_len_arr)
        seq_lens = kv_len_arr.to(device, torch.int32)
        # The pages in use, numbered as they are listed: a cache in two parts is joined for them alone.
        numbers = torch.arange(kv_indices.numel(), device=device, dtype=torch.int64)
        places, _ = tables(kv_indptr.to(device), numbers, torch.zeros_like(seq_lens), page_size)
        self._pages, self._places = kv_indices.long(), places
        self._num_queries, self._page_size, self._heads = num_queries, page_size, num_heads
        self._types = PlannedTypes(q_data_type, kv_data_type, output)
        self._arguments = {
            "seq_lens": seq_lens,
            "cu_seqlens_q": qo_indptr.to(device, torch.int32),
            **({} if causal else all_visible(num_queries, seq_lens)),
            "max_seqlen_q": max(longest, 1),
            "scale": sm_scale,
        }

    @checked()
    def run(
        self, q_nope: Tensor | None = None, q_pe: Tensor | None = None, ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        profiler_buffer: Tensor | None = None, kv_len: Tensor | None = None, page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False, *, query: Tensor | tuple[Tensor, Tensor] | None = None,
        kv_cache: Tensor | tuple[Tensor, Tensor] | None = None, **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attends q_nope [T, heads, 512] and q_pe [T, heads, 64] to a cache of rows of 512 and 64 columns.

        ckv_cache [pages, page_size, 512] and kpe_cache [pages, page_size, 64] are read in place if they are the first
        and last columns of one tensor of 576; else each call copies the batch's pages together, and the queries
        likewise. query and kv_cache replace the first four: one tensor of 576 columns, or the two parts;
        profiler_buffer has no effect. Returns out [T, heads, 512], with return_lse also lse, fp32 [T, heads], in base 2
        unless return_lse_base_on_e. Raises RuntimeError before plan(), NotImplementedError for unsupported arguments,
        ValueError for wrong shapes or dtypes.
        """
        if self._arguments is None:
            raise refusal("plan()", "to be called first", kind=RuntimeError)
        _refuse({"kv_len": kv_len, "page_table": page_table, **options})
        q_nope, q_pe = _parts("query", query, q_nope, q_pe)
        ckv_cache, kpe_cache = _parts("kv_cache", kv_cache, ckv_cache, kpe_cache)
        expect_dims("[T, heads, dim]", q_nope=q_nope, q_pe=q_pe)
        expect_dims("[pages, page_size, dim]", ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        self._types.check(q_nope, ckv_cache)
        if q_nope.shape[1:] != (self._heads, 512) or q_nope.shape[0] < self._num_queries:
            raise refusal("q_nope", f"[{self._num_queries}, {self._heads}, 512]", [*q_nope.shape])
        if ckv_cache.shape[1] != self._page_size:
            raise refusal("ckv_cache", f"pages of {self._page_size}", f"shape {[*ckv_cache.shape]}")
        cache, table = _adjacent(ckv_cache, kpe_cache), self._places
        if cache is None:
            pages = self._pages.clamp(0, ckv_cache.shape[0] - 1)
            cache = torch.cat([ckv_cache[pages], kpe_cache[pages]], -1)
        else:
            page_ids = torch.nn.functional.pad(self._pages, (0, 1), value=-1)
            table = page_ids[table.long()].int()
        q = _adjacent(q_nope, q_pe)
        rows = cache[:, :, None]
        result, lse_on_e = tree_attention(
            torch.cat([q_nope, q_pe], -1) if q is None else q,
            rows,
            rows[..., :512],
            table,
            **self._arguments,
            out=out,
            return_lse=True,
        )
        if not return_lse:
            return result
        lse_on_e = lse_on_e if return_lse_base_on_e else lse_on_e / math.log(2)
        return result, lse_on_e if lse is None else lse.copy_(lse_on_e)


def _refuse(options: dict[str, Any]) -> None:
    for name, value in sorted(options.items()):
        if name not in HINTS and value is not None and (isinstance(value, Tensor) or value):
            raise refusal(name, "none", "one", NotImplementedError)


def _parts(
    name: str, both: Tensor | tuple[Tensor, Tensor] | None, first: Tensor | None, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    if both is not None:
        if first is not None or last is not None:
            raise refusal(name, "it alone", "its parts beside it")
        first, last = (both[..., :512], both[..., 512:]) if isinstance(both, Tensor) else both
    if first is None or last is None:
        raise refusal(name, "a tensor or its two parts", "none")
    return first, last


def _adjacent(first: Tensor, last: Tensor) -> Tensor | None:
    """Returns both as one view if the columns of `last` follow the first tensor's, else None."""
    width = first.shape[-1]
    together = (
        first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        and first.dtype == last.dtype
        and first.shape[:-1] == last.shape[:-1]
        and first.stride() == last.stride()
        and first.stride(-1) == 1
        and last.storage_offset() == first.storage_offset() + width
    )
    return first.as_strided((*first.shape[:-1], width + last.shape[-1]), first.stride()) if together else None
