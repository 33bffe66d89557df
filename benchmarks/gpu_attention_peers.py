"""What users of a GPU call for attention over a paged cache: FlashInfer, FlashAttention, vLLM's Triton kernel.

Written for flashinfer-python 0.7, flash-attn 2.8, FlashAttention 3 and vLLM 0.32. Each is a peer of `tree_attention`
(attention_peers.py) where its package is installed, or was carried there (carried.py). None is a dependency.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import flashinfer_kernel
import torch
import torch.nn.functional as F
from carried import flash_attention_3, loaded_by
from suite import package
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from attention_peers import Problem

FLASHINFER_WORKSPACE = 128 << 20  # bytes, as its documentation recommends
FLASH_ATTENTION_PAGE = 256  # tokens; its pages are multiples of it
# vLLM's values: from which length its decoding splits sequences, and into how many parts.
TRITON_LEAST_PROGRAMS, TRITON_SEGMENTS = 128, 16


class FlashInferTree:
    """Prefill with a custom mask: over the whole context, so that it is made and packed anew in each step."""

    name = "FlashInfer (custom mask)"
    mask = "tree"
    wrapper_name = "BatchPrefillWithPagedKVCacheWrapper"
    absent = staticmethod(package("flashinfer", "cuda"))

    def __init__(self, problem: Problem) -> None:
        p = self.problem = problem
        self.wrapper = self.make_wrapper(torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=p.device))
        lengths = torch.tensor(p.lengths, dtype=torch.int32)
        pages = -(-lengths // p.page_size)
        self.indptr = torch.zeros(p.batch + 1, dtype=torch.int32)
        self.indptr[1:] = pages.cumsum(0)
        self.indptr = self.indptr.to(p.device)
        rows = zip(p.page_table, pages.tolist(), strict=True)
        self.indices = torch.cat([row[:count] for row, count in rows])
        self.last_page_len = (lengths - (pages - 1) * p.page_size).to(p.device)
        self.plan()

    def make_wrapper(self, workspace: Tensor) -> Any:
        return getattr(importlib.import_module("flashinfer"), self.wrapper_name)(workspace, "NHD")

    def plan(self) -> None:
        p = self.problem
        self.wrapper.plan(
            *self.query_form(), self.indptr, self.indices, self.last_page_len, p.heads, p.kv_heads, p.head_dim,
            p.page_size, sm_scale=p.scale, q_data_type=p.dtype, kv_data_type=p.cache_dtype, **self.visibility(),
        )  # fmt: skip

    def query_form(self) -> tuple[Tensor, ...]:
        return (self.problem.trees.cu_nodes,)

    def visibility(self) -> dict[str, Any]:
        p = self.problem
        tree = torch.from_numpy(p.tree.mask).to(p.device)
        prefixes = (tree.new_ones(p.tree.num_nodes, length - p.tree.num_nodes) for length in p.lengths)
        return {"custom_mask": torch.cat([torch.cat([prefix, tree], 1).flatten() for prefix in prefixes])}

    def run(self, copy: int) -> Tensor:
        p = self.problem
        return self.wrapper.run(p.q, (p.k[copy], p.v[copy]))


class FlashInferCausal(FlashInferTree):
    name = "FlashInfer (causal)"
    mask = "causal"

    def visibility(self) -> dict[str, Any]:
        return {"causal": True}


class FlashInferDecode(FlashInferCausal):
    name = "FlashInfer decode"
    wrapper_name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(self, problem: Problem) -> None:
        if problem.tree.num_nodes != 1:
            raise ValueError("one query per sequence only")
        super().__init__(problem)

    def query_form(self) -> tuple[Tensor, ...]:
        return ()

    def visibility(self) -> dict[str, Any]:
        return {}


class FlashInferKernelTree(FlashInferTree):
    """The kernel that FlashInferTree ends in, without its package."""

    name = "FlashInfer's kernel (custom mask)"
    absent = staticmethod(loaded_by(flashinfer_kernel.library))

    def make_wrapper(self, workspace: Tensor) -> Any:
        return flashinfer_kernel.Wrapper(workspace, flashinfer_kernel.library())


class FlashInferKernelCausal(FlashInferKernelTree):
    name = "FlashInfer's kernel (causal)"
    mask = "causal"
    visibility = FlashInferCausal.visibility


class TorchFlashAttention:
    """The flash-attn kernel of torch, over dense K and V. Its causal mask ignores a prefix, so that there is none."""

    name = "torch's flash-attn (causal)"
    mask = "causal"
    absent = staticmethod(package("torch", "cuda"))

    def __init__(self, problem: Problem) -> None:
        p = self.problem = problem
        p.expect_same_dtype()
        if set(p.lengths) != {p.tree.num_nodes}:
            raise ValueError("prompts without a prefix only")
        self.caches = [p.gathered(copy) for copy in range(p.copies)]

    def run(self, copy: int) -> Tensor:
        p = self.problem
        q = p.q.view(p.batch, -1, p.heads, p.head_dim).transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(
                q, *self.caches[copy], is_causal=True, scale=p.scale, enable_gqa=p.heads > p.kv_heads
            )
        return out.transpose(1, 2).reshape(p.q.shape)


class FlashAttention:
    """flash-attn's paged form, on a cache of its own where the pages are not multiples of 256."""

    name = "flash-attn (causal)"
    mask = "causal"
    absent = staticmethod(package("flash_attn", "cuda"))

    def __init__(self, problem: Problem) -> None:
        p = self.problem = problem
        p.expect_same_dtype()
        self.attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
        self.page_table, self.caches = p.page_table, list(zip(p.k, p.v, strict=True))
        if p.page_size % FLASH_ATTENTION_PAGE:
            pages = -(-p.max_length // FLASH_ATTENTION_PAGE)
            self.page_table = torch.randperm(p.batch * pages, device=p.device).view(p.batch, pages).int()
            self.caches = [self.paged(p.gathered(copy)) for copy in range(p.copies)]

    def paged(self, dense: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, Hkv, L, D] each, in the pages of `page_table`."""
        p, (batch, pages) = self.problem, self.page_table.shape
        caches = []
        for tensor in dense:
            rows = tensor.new_zeros(batch, pages * FLASH_ATTENTION_PAGE, p.kv_heads, p.head_dim)
            rows[:, : p.max_length] = tensor.transpose(1, 2)
            cache = torch.empty_like(rows).view(-1, FLASH_ATTENTION_PAGE, p.kv_heads, p.head_dim)
            cache[self.page_table.flatten().long()] = rows.view_as(cache)
            caches.append(cache)
        return caches[0], caches[1]

    def run(self, copy: int) -> Tensor:
        p = self.problem
        q = p.q.view(p.batch, -1, p.heads, p.head_dim)
        out = self.attend(
            q, *self.caches[copy], cache_seqlens=p.seq_lens, block_table=self.page_table, softmax_scale=p.scale,
            causal=True,
        )  # fmt: skip
        return out.view(p.q.shape)


class FlashAttention3:
    """FlashAttention 3 on the problem's own pages; the carried one has kernels for heads of 128 in bf16 alone."""

    name = "flash-attn 3 (causal)"
    mask = "causal"
    absent = staticmethod(loaded_by(flash_attention_3))

    def __init__(self, problem: Problem) -> None:
        p = self.problem = problem
        if (p.head_dim, p.dtype, p.cache_dtype) != (128, torch.bfloat16, torch.bfloat16):
            raise ValueError("compiled for head size 128 and bfloat16")
        self.attend = flash_attention_3().flash_attn_with_kvcache

    def run(self, copy: int) -> Tensor:
        p = self.problem
        q = p.q.view(p.batch, -1, p.heads, p.head_dim)
        out = self.attend(
            q, p.k[copy], p.v[copy], cache_seqlens=p.seq_lens, page_table=p.page_table, softmax_scale=p.scale,
            causal=True,
        )  # fmt: skip
        return out.view(p.q.shape)


class TritonUnified:
    """vLLM's Triton kernel; a tree, the same for all sequences, is what it adds to the scores between queries."""

    name = "Triton unified attention"
    mask = "tree"
    absent = staticmethod(package("vllm", "cuda"))

    def __init__(self, problem: Problem) -> None:
        p = self.problem = problem
        p.expect_same_dtype()
        kernel = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
        self.attend, self.out = kernel.unified_attention, torch.empty_like(p.q)
        self.between_queries: Tensor | None = None
        if p.tree.num_nodes > 1 and not p.is_prefill:
            tree = torch.from_numpy(p.tree.mask).to(p.device)
            self.between_queries = torch.zeros(tree.shape, device=p.device).masked_fill(~tree, -torch.inf)
        most = TRITON_LEAST_PROGRAMS // p.kv_heads
        parts = most, p.heads, TRITON_SEGMENTS
        dim = 1 << (p.head_dim - 1).bit_length()
        self.split = {"seq_threshold_3D": most, "num_par_softmax_segments": TRITON_SEGMENTS}
        for name, shape in (("output", (*parts, dim)), ("max", parts), ("expsum", parts)):
            self.split[f"softmax_segm_{name}"] = torch.empty(shape, dtype=torch.float32, device=p.device)

    def run(self, copy: int) -> Tensor:
        p = self.problem
        self.attend(
            q=p.q, k=p.k[copy], v=p.v[copy], out=self.out, cu_seqlens_q=p.trees.cu_nodes,
            max_seqlen_q=p.tree.num_nodes, seqused_k=p.seq_lens, max_seqlen_k=p.max_length, softmax_scale=p.scale,
            causal=True, window_size=(-1, -1), block_table=p.page_table, softcap=0.0, q_descale=None, k_descale=None,
            v_descale=None, qq_bias=self.between_queries, **self.split,
        )  # fmt: skip
        return self.out


PEERS = [
    FlashInferTree, FlashInferCausal, FlashInferDecode, FlashInferKernelTree, FlashInferKernelCausal, FlashAttention,
    FlashAttention3, TorchFlashAttention, TritonUnified,
]  # fmt: skip
