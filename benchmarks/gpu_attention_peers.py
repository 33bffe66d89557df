"""GPU peers of attention over a paged cache: FlashInfer's kernel, FlashAttention, vLLM's Triton kernel.

Written for flashinfer-python 0.7, FlashAttention 3 and vLLM 0.32, carried (carried.py) or, the latter two, installed.
"""

from __future__ import annotations

import importlib

import flashinfer_kernel
import torch
import torch.nn.functional as F
from attention_problem import Problem, paged_tree_causal
from carried import flash_attention_3, loaded_by
from suite import Way, package, peer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# vLLM's values: the programs below which decoding splits sequences, and the parts.
TRITON_LEAST_PROGRAMS, TRITON_SEGMENTS = 128, 16


HAS_KERNEL = loaded_by(flashinfer_kernel.library)


def by_kernel(p: Problem, has_mask: bool) -> Way:
    wrapper = flashinfer_kernel.Wrapper(p, has_mask)
    wrapper.plan()
    return Way(wrapper.run, wrapper.plan)


@peer("FlashInfer's kernel (custom mask)", when=HAS_KERNEL)
def flashinfer_kernel_tree(p: Problem) -> Way:
    return by_kernel(p, has_mask=True)


@peer("FlashInfer's kernel (causal)", when=HAS_KERNEL, like=paged_tree_causal)
def flashinfer_kernel_causal(p: Problem) -> Way:
    return by_kernel(p, has_mask=False)


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


@peer("flash-attn 3 (causal)", when=loaded_by(flash_attention_3), like=paged_tree_causal)
def flash_attention_of_hopper(p: Problem) -> Way:
    """The carried library has bf16 heads of 128 alone."""
    if (p.head_dim, p.dtype, p.cache_dtype) != (128, torch.bfloat16, torch.bfloat16):
        raise ValueError("compiled for head size 128 and bfloat16")
    attend, rows = flash_attention_3().flash_attn_with_kvcache, (p.batch, p.tree.num_nodes, p.heads, p.head_dim)
    how = {"cache_seqlens": p.seq_lens, "softmax_scale": p.scale, "causal": True, "page_table": p.page_table}
    return Way(lambda copy: attend(p.q.view(rows), p.k[copy], p.v[copy], **how).view(p.q.shape))


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
    *(flashinfer_kernel_tree, flashinfer_kernel_causal, flash_attention_of_hopper, torch_flash_attention),
    triton_unified,
]
