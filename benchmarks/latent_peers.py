"""Attention over a latent cache (multi-head latent attention): `tree_attention`, and what users would call instead.

Sizes are DeepSeek-V3's: a cached row of 512 compressed and 64 rotated columns serves 128 query heads. Of each head, a
query has 128 + 64 columns before its projection is absorbed, and a value 128.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from attention_peers import (
    L3_BYTES,
    PagedTree,
    PagedTreeCausal,
    PagedTreeWgmma,
    Problem,
    lengths_of,
    made,
    unsupported,
)
from gpu_attention_peers import FlashInferTree
from named_trees import nodes_of
from suite import Mismatch, Op, Shape, always, lacking_memory, package
from torch import Tensor

RANK, ROTATED, NOPE, VALUE = 512, 64, 128, 128
ROW = RANK + ROTATED


@dataclass
class LatentProblem(Problem):
    """One call on a latent cache, and the same attention by heads with K and V of their own.

    w_k [H, 128, 512] and w_v [H, 512, 128] expand a compressed row into a head's K and V. The absorbed queries are made
    with w_k, so that the op's output times w_v is what the heads give.
    """

    is_latent = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale = (NOPE + ROTATED) ** -0.5
        self.w_v = self.random(self.heads, RANK, VALUE) * RANK**-0.5

    def queries(self, tokens: int) -> Tensor:
        self.w_k = self.random(self.heads, NOPE, RANK) * RANK**-0.5
        self.head_queries = self.random(tokens, self.heads, NOPE + ROTATED)
        absorbed = torch.einsum("thd,hdc->thc", self.head_queries[..., :NOPE], self.w_k)
        return torch.cat([absorbed, self.head_queries[..., NOPE:]], dim=-1)

    def values(self, k: Tensor) -> Tensor:
        return k[..., :RANK]

    @property
    def head_dim_v(self) -> int:
        return RANK

    def expanded(self, copy: int) -> tuple[Tensor, Tensor]:
        """K [B, H, L, 192] and V [B, H, L, 128], as a cache without compression has them."""
        compressed, rotated = self.gathered(copy)[0][:, 0].split([RANK, ROTATED], dim=-1)
        k = compressed.new_empty(self.batch, self.heads, self.max_length, NOPE + ROTATED)
        k[..., :NOPE] = torch.einsum("blc,hdc->bhld", compressed, self.w_k)
        k[..., NOPE:] = rotated[:, None]
        return k, torch.einsum("blc,hcd->bhld", compressed, self.w_v).contiguous()


class SdpaOnExpandedHeads:
    """torch SDPA on K and V of each head, as transformers caches them; only attention is timed."""

    name = "SDPA on expanded heads"
    mask = "tree"
    only_headline = True
    is_expanded = True
    absent = staticmethod(always)

    def __init__(self, problem: LatentProblem) -> None:
        p = self.problem = problem
        kv_bytes = p.batch * p.max_length * p.heads * (NOPE + ROTATED + VALUE) * p.dtype.itemsize
        copies = 1 if kv_bytes >= 4 * L3_BYTES[p.device.type] else p.copies
        if reason := lacking_memory((copies + 1) * kv_bytes, p.device):
            raise ValueError(reason)
        self.caches = [p.expanded(copy) for copy in range(copies)]
        self.visible = self.plan()

    def plan(self) -> Tensor:
        return self.problem.visible()[:, None]

    def run(self, copy: int) -> Tensor:
        p = self.problem
        q = p.head_queries.view(p.batch, -1, *p.head_queries.shape[1:]).transpose(1, 2)
        k, v = self.caches[copy % len(self.caches)]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible, scale=p.scale).transpose(1, 2)


class SdpaOnGatheredRows:
    """torch SDPA on the gathered latent rows; all heads are queries of one, as `enable_gqa` would copy the rows."""

    name = "SDPA on gathered rows"
    mask = "tree"
    absent = staticmethod(always)

    def __init__(self, problem: LatentProblem) -> None:
        self.problem = problem
        self.visible = self.plan()

    def plan(self) -> Tensor:
        return self.problem.visible()[:, None].repeat_interleave(self.problem.heads, dim=2)

    def run(self, copy: int) -> Tensor:
        p = self.problem
        k, v = p.gathered(copy)
        q = p.q.view(p.batch, 1, -1, ROW)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible, scale=p.scale).view(-1, p.heads, RANK)


class FlashMla:
    """DeepSeek's kernel for Hopper, on its pages of 64."""

    name = "FlashMLA (causal)"
    mask = "causal"
    absent = staticmethod(package("flash_mla", "cuda"))

    def __init__(self, problem: LatentProblem) -> None:
        p = self.problem = problem
        p.expect_same_dtype()
        if p.page_size != 64:
            raise ValueError("pages of 64 only")
        self.package = importlib.import_module("flash_mla")
        self.plan()

    def plan(self) -> None:
        p = self.problem
        self.schedule: tuple[Any, Any] = self.package.get_mla_metadata(p.seq_lens, p.tree.num_nodes * p.heads, 1)

    def run(self, copy: int) -> Tensor:
        p = self.problem
        q = p.q.view(p.batch, -1, p.heads, ROW)
        out, _ = self.package.flash_mla_with_kvcache(
            q, p.k[copy], p.page_table, p.seq_lens, RANK, *self.schedule, softmax_scale=p.scale, causal=True
        )
        return out.flatten(0, 1)


class FlashInferMla(FlashInferTree):
    """FlashInfer's latent attention, which takes both parts of a row as tensors of their own."""

    name = "FlashInfer MLA (causal)"
    mask = "causal"

    def make_wrapper(self, workspace: Tensor) -> Any:
        return importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace)

    def plan(self) -> None:
        p = self.problem
        self.wrapper.plan(
            p.trees.cu_nodes, self.indptr, self.indices, p.seq_lens, p.heads, RANK, ROTATED, p.page_size, True, p.scale,
            p.dtype, p.cache_dtype,
        )  # fmt: skip

    def run(self, copy: int) -> Tensor:
        parts = [part for x in (self.problem.q, self.problem.k[copy][:, :, 0]) for part in x.split([RANK, ROTATED], -1)]
        return self.wrapper.run(*parts)


# The op --------------------------------------------------------------------------------------------------------------


def row_bytes_of(shape: Shape) -> int:
    """Returns the bytes of the cached rows."""
    size = getattr(torch, shape["dtype"]).itemsize if shape["cache"] == "same" else 1
    return sum(lengths_of(shape)) * ROW * size


def problem_of(shape: Shape, device: torch.device) -> LatentProblem:
    return made(LatentProblem, {**shape, "head_dim": ROW}, row_bytes_of(shape), device)


def memory_of(shape: Shape) -> int:
    """The copies of the cache, dense K and V, and SDPA's mask and scores; not the expanded heads, which ask by
    themselves."""
    lengths = lengths_of(shape)
    rows = nodes_of(shape["tree"]) * int(shape["heads"].split("/")[0])
    dense = max(lengths) * len(lengths) * (4 * ROW + 12 * rows)
    return max(row_bytes_of(shape), 2 * L3_BYTES["cpu"]) * 2 + dense


def check(problem: LatentProblem, ours: PagedTree, theirs: Any) -> None:
    expected = (PagedTreeCausal(problem) if theirs.mask == "causal" else ours).run(0).float()
    if getattr(theirs, "is_expanded", False):
        expected = torch.einsum("thc,hcv->thv", expected, problem.w_v.float())
    found = theirs.run(0).reshape(expected.shape).float()
    error = ((found - expected).square().mean() / expected.square().mean()).sqrt().item()
    if not error <= 0.03:
        raise Mismatch(f"the root mean square of the output's error is {error:.3f} of that of the output")


OP = Op(
    name="latent_attention",
    base={
        "batch": 4, "length": 4096, "tree": "binary 8", "heads": "128/1", "page_size": 64, "dtype": "bfloat16",
        "cache": "same", "lengths": "uniform", "threads": 0,
    },
    axes={
        "batch": [1, 16],
        "length": [1024, 16384],
        "tree": ["chain 1", "chain 4", "binary 32", "EAGLE-2 60"],
        "heads": ["16/1", "32/1"],
        "page_size": [1, 16],
        "dtype": ["float16"],
        "cache": ["fp8"],
        "lengths": ["ragged"],
    },
    headline=[
        {"batch": 8, "length": 2048, "tree": "chain 1"},
        {"batch": 1, "length": 16384, "tree": "binary 16", "heads": "16/1"},
    ],
    quick={"batch": 1, "length": 1024, "heads": "16/1"},
    problem=problem_of,
    peers=[
        PagedTree, PagedTreeCausal, PagedTreeWgmma, SdpaOnExpandedHeads, SdpaOnGatheredRows, FlashMla, FlashInferMla,
    ],
    memory=memory_of,
    check=check,
    unsupported=unsupported,
)  # fmt: skip
