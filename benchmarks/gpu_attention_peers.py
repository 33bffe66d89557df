"""GPU peers of attention over a paged cache: FlashInfer, FlashAttention, vLLM's Triton kernel.

Written for flashinfer-python 0.7, flash-attn 2.8, FlashAttention 3 and vLLM 0.32, installed or carried (carried.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import flashinfer_kernel
import torch
import torch.nn.functional as F
from attention_problem import Problem, paged_tree_causal
from carried import flash_attention_3, loaded_by
from suite import Way, package, peer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASHINFER_WORKSPACE = 128 << 20  # bytes, recommended by its documentation
FLASH_ATTENTION_PAGE = 256  # tokens; its pages are multiples of it
# vLLM's values: the programs below which decoding splits sequences, and the parts.
TRITON_LEAST_PROGRAMS, TRITON_SEGMENTS = 128, 16


def workspace(p: Problem) -> Tensor:
    return torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=p.device)


def pages_of(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Returns FlashInfer's offsets, pages, and rows of the last page."""
    lengths = torch.tensor(p.lengths, dtype=torch.int32)
    pages = -(-lengths // p.page_size)
    offsets = F.pad(pages.cumsum(0), (1, 0)).int()
    indices = torch.cat([row[:count] for row, count in zip(p.page_table, pages.tolist(), strict=True)])
    return offsets.to(p.device), indices, (lengths - (pages - 1) * p.page_size).to(p.device)


def custom_mask(p: Problem) -> dict[str, Tensor]:
    """It covers the whole context, so each step packs it again."""
    tree = torch.from_numpy(p.tree.mask).to(p.device)
    prefixes = (tree.new_ones(p.tree.num_nodes, length - p.tree.num_nodes) for length in p.lengths)
    return {"custom_mask": torch.cat([torch.cat([prefix, tree], 1).flatten() for prefix in prefixes])}


def causal(p: Problem) -> dict[str, Any]:
    return {"causal": True}


def wrapped(p: Problem, wrapper: Any, visibility: Callable[[Problem], dict[str, Any]], *queries: Tensor) -> Way:
    """queries: their offsets."""
    where = *queries, *pages_of(p)
    sizes = p.heads, p.kv_heads, p.head_dim, p.page_size
    types = {"sm_scale": p.scale, "q_data_type": p.dtype, "kv_data_type": p.cache_dtype}

    def plan() -> None:
        wrapper.plan(*where, *sizes, **types, **visibility(p))

    plan()
    return Way(lambda copy: wrapper.run(p.q, (p.k[copy], p.v[copy])), plan)


def prefill(p: Problem) -> Any:
    return importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace(p), "NHD")


def kernel(p: Problem) -> Any:
    return flashinfer_kernel.Wrapper(workspace(p), flashinfer_kernel.library())


HAS_FLASHINFER, HAS_KERNEL = package("flashinfer", "cuda"), loaded_by(flashinfer_kernel.library)


@peer("FlashInfer (custom mask)", when=HAS_FLASHINFER)
def flashinfer_tree(p: Problem) -> Way:
    return wrapped(p, prefill(p), custom_mask, p.trees.cu_nodes)


@peer("FlashInfer (causal)", when=HAS_FLASHINFER, like=paged_tree_causal)
def flashinfer_causal(p: Problem) -> Way:
    return wrapped(p, prefill(p), causal, p.trees.cu_nodes)


@peer("FlashInfer decode", when=HAS_FLASHINFER, like=paged_tree_causal)
def flashinfer_decode(p: Problem) -> Way:
    if p.tree.num_nodes != 1:
        raise ValueError("one query per sequence only")
    decode = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(workspace(p), "NHD")
    return wrapped(p, decode, lambda _: {})


@peer("FlashInfer's kernel (custom mask)", when=HAS_KERNEL)
def flashinfer_kernel_tree(p: Problem) -> Way:
    return wrapped(p, kernel(p), custom_mask, p.trees.cu_nodes)


@peer("FlashInfer's kernel (causal)", when=HAS_KERNEL, like=paged_tree_causal)
def flashinfer_kernel_causal(p: Problem) -> Way:
    return wrapped(p, kernel(p), causal, p.trees.cu_nodes)


@peer("torch's flash-attn (causal)", when=package("torch", "cuda"), like=paged_tree_causal)
def torch_flash_attention(p: Problem) -> Way:
    """Its causal mask excludes a prefix."""
    p.expect_same_dtype()
    if set(p.lengths) != {p.tree.num_nodes}:
        raise ValueError("prompts without a prefix only")
    caches = [p.gathered(copy) for copy in range(p.copies)]
    how = {"is_causal": True, "scale": p.scale, "enable_gqa": p.heads > p.kv_heads}

    def run(copy: int) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(p.padded_queries(), *caches[copy], **how)
        return out.transpose(1, 2).reshape(p.q.shape)

    return Way(run)


def flash_attention_way(p: Problem, attend: Callable[..., Tensor], caches: list[Any], **tables: Tensor) -> Way:
    how = {"cache_seqlens": p.seq_lens, "softmax_scale": p.scale, "causal": True} | tables
    rows = p.batch, p.tree.num_nodes, p.heads, p.head_dim
    return Way(lambda copy: attend(p.q.view(rows), *caches[copy], **how).view(p.q.shape))


@peer("flash-attn (causal)", when=package("flash_attn", "cuda"), like=paged_tree_causal)
def flash_attention(p: Problem) -> Way:
    """Needs a separate cache unless pages are multiples of 256."""
    p.expect_same_dtype()
    attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
    if p.page_size % FLASH_ATTENTION_PAGE == 0:
        return flash_attention_way(p, attend, list(zip(p.k, p.v, strict=True)), block_table=p.page_table)
    pages = -(-p.max_length // FLASH_ATTENTION_PAGE)
    page_table = torch.randperm(p.batch * pages, device=p.device).view(p.batch, pages).int()

    def paged(dense: Tensor) -> Tensor:
        """dense: [B, Hkv, L, D]."""
        rows = dense.new_zeros(p.batch, pages * FLASH_ATTENTION_PAGE, p.kv_heads, p.head_dim)
        rows[:, : p.max_length] = dense.transpose(1, 2)
        cache = torch.empty_like(rows).view(-1, FLASH_ATTENTION_PAGE, p.kv_heads, p.head_dim)
        cache[page_table.flatten().long()] = rows.view_as(cache)
        return cache

    caches = [[paged(dense) for dense in p.gathered(copy)] for copy in range(p.copies)]
    return flash_attention_way(p, attend, caches, block_table=page_table)


@peer("flash-attn 3 (causal)", when=loaded_by(flash_attention_3), like=paged_tree_causal)
def flash_attention_of_hopper(p: Problem) -> Way:
    """The carried library has bf16 heads of 128 alone."""
    if (p.head_dim, p.dtype, p.cache_dtype) != (128, torch.bfloat16, torch.bfloat16):
        raise ValueError("compiled for head size 128 and bfloat16")
    attend = flash_attention_3().flash_attn_with_kvcache
    return flash_attention_way(p, attend, list(zip(p.k, p.v, strict=True)), page_table=p.page_table)


@peer("Triton unified attention", when=package("vllm", "cuda"))
def triton_unified(p: Problem) -> Way:
    """A bias between queries expresses a tree, equal for all sequences."""
    p.expect_same_dtype()
    attend = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    out, between_queries = torch.empty_like(p.q), None
    if p.tree.num_nodes > 1 and not p.is_prefill:
        tree = torch.from_numpy(p.tree.mask).to(p.device)
        between_queries = torch.zeros(tree.shape, device=p.device).masked_fill(~tree, -torch.inf)
    how = {"out": out, "cu_seqlens_q": p.trees.cu_nodes, "max_seqlen_q": p.tree.num_nodes, "seqused_k": p.seq_lens}
    how |= {"max_seqlen_k": p.max_length, "block_table": p.page_table, "softmax_scale": p.scale, "causal": True}
    how |= {"window_size": (-1, -1), "softcap": 0.0, "q_descale": None, "k_descale": None, "v_descale": None}
    most = TRITON_LEAST_PROGRAMS // p.kv_heads
    parts, dim = (most, p.heads, TRITON_SEGMENTS), 1 << (p.head_dim - 1).bit_length()
    how |= {"qq_bias": between_queries, "seq_threshold_3D": most, "num_par_softmax_segments": TRITON_SEGMENTS}
    for name, shape in (("output", (*parts, dim)), ("max", parts), ("expsum", parts)):
        how[f"softmax_segm_{name}"] = torch.empty(shape, dtype=torch.float32, device=p.device)

    def run(copy: int) -> Tensor:
        attend(q=p.q, k=p.k[copy], v=p.v[copy], **how)
        return out

    return Way(run)


PEERS = [
    *(flashinfer_tree, flashinfer_causal, flashinfer_decode, flashinfer_kernel_tree, flashinfer_kernel_causal),
    *(flash_attention, flash_attention_of_hopper, torch_flash_attention, triton_unified),
]
