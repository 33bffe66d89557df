"""Attention over a latent cache (multi-head latent attention): `tree_attention`, and what users would call instead.

Sizes are DeepSeek-V3's: a cached row of 512 compressed and 64 rotated columns serves 128 query heads. Of each head, a
query has 128 + 64 columns before its projection is absorbed, and a value 128.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from attention_problem import (
    L3_BYTES,
    LAYOUT,
    OURS,
    Problem,
    kv_bytes_of,
    lengths_of,
    paged_tree,
    paged_tree_causal,
    unsupported,
)
from gpu_attention_peers import HAS_FLASHINFER, pages_of, workspace
from named_trees import nodes_of
from suite import Op, Shape, Way, check_mean_error, lacking_memory, package, peer
from torch import Tensor

RANK, ROTATED, NOPE, VALUE = 512, 64, 128, 128
ROW = RANK + ROTATED


class LatentProblem(Problem):
    """One call on a latent cache, and the same attention by heads with K and V of their own.

    w_k [H, 128, 512] and w_v [H, 512, 128] expand a compressed row into a head's K and V. The absorbed queries are made
    with w_k, so that the op's output times w_v is what the heads give.
    """

    is_latent = True
    head_dim_v = RANK

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__({**shape, "head_dim": ROW}, device)
        self.scale = (NOPE + ROTATED) ** -0.5
        self.w_v = self.random(self.heads, RANK, VALUE) * RANK**-0.5

    def queries(self, tokens: int) -> Tensor:
        self.w_k = self.random(self.heads, NOPE, RANK) * RANK**-0.5
        self.head_queries = self.random(tokens, self.heads, NOPE + ROTATED)
        absorbed = torch.einsum("thd,hdc->thc", self.head_queries[..., :NOPE], self.w_k)
        return torch.cat([absorbed, self.head_queries[..., NOPE:]], dim=-1)

    def values(self, k: Tensor) -> Tensor:
        return k[..., :RANK]

    def expanded(self, copy: int) -> tuple[Tensor, Tensor]:
        """K [B, H, L, 192] and V [B, H, L, 128], as a cache without compression has them."""
        compressed, rotated = self.gathered(copy)[0][:, 0].split([RANK, ROTATED], dim=-1)
        k = compressed.new_empty(self.batch, self.heads, self.max_length, NOPE + ROTATED)
        k[..., :NOPE] = torch.einsum("blc,hdc->bhld", compressed, self.w_k)
        k[..., NOPE:] = rotated[:, None]
        return k, torch.einsum("blc,hcd->bhld", compressed, self.w_v).contiguous()


@peer("pagedtree by heads")
def by_heads(p: LatentProblem) -> Way:
    """What the op gives, in the values of the heads."""
    way = paged_tree.make(p)
    return Way(lambda copy: torch.einsum("thc,hcv->thv", way.run(copy).float(), p.w_v.float()))


@peer("SDPA on expanded heads", like=by_heads, only_headline=True)
def sdpa_on_expanded_heads(p: LatentProblem) -> Way:
    """torch SDPA on K and V of each head, as transformers caches them; only attention is timed."""
    kv_bytes = p.batch * p.max_length * p.heads * (NOPE + ROTATED + VALUE) * p.dtype.itemsize
    copies = 1 if kv_bytes >= 4 * L3_BYTES[p.device.type] else p.copies
    if reason := lacking_memory((copies + 1) * kv_bytes, p.device):
        raise ValueError(reason)
    caches = [p.expanded(copy) for copy in range(copies)]

    def plan() -> Tensor:
        return p.visible()[:, None]

    visible = plan()

    def run(copy: int) -> Tensor:
        q = p.head_queries.view(p.batch, -1, *p.head_queries.shape[1:]).transpose(1, 2)
        k, v = caches[copy % copies]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=p.scale).transpose(1, 2)

    return Way(run, plan)


@peer("SDPA on gathered rows")
def sdpa_on_gathered_rows(p: LatentProblem) -> Way:
    """torch SDPA on the gathered latent rows; all heads are queries of one, as `enable_gqa` would copy the rows."""

    def plan() -> Tensor:
        return p.visible()[:, None].repeat_interleave(p.heads, dim=2)

    visible = plan()

    def run(copy: int) -> Tensor:
        k, v = p.gathered(copy)
        q = p.q.view(p.batch, 1, -1, ROW)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=p.scale).view(-1, p.heads, RANK)

    return Way(run, plan)


@peer("FlashMLA (causal)", when=package("flash_mla", "cuda"), like=paged_tree_causal)
def flash_mla(p: LatentProblem) -> Way:
    """DeepSeek's kernel for Hopper, on its pages of 64."""
    p.expect_same_dtype()
    if p.page_size != 64:
        raise ValueError("pages of 64 only")
    package = importlib.import_module("flash_mla")

    def plan() -> tuple[Tensor, Tensor]:
        return package.get_mla_metadata(p.seq_lens, p.tree.num_nodes * p.heads, 1)

    schedule, q = plan(), p.q.view(p.batch, -1, p.heads, ROW)

    def run(copy: int) -> Tensor:
        where = p.k[copy], p.page_table, p.seq_lens, RANK, *schedule
        return package.flash_mla_with_kvcache(q, *where, softmax_scale=p.scale, causal=True)[0].flatten(0, 1)

    return Way(run, plan)


@peer("FlashInfer MLA (causal)", when=HAS_FLASHINFER, like=paged_tree_causal)
def flashinfer_mla(p: LatentProblem) -> Way:
    """FlashInfer's latent attention, which takes both parts of a row as tensors of their own."""
    wrapper = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace(p))
    offsets, indices, _ = pages_of(p)
    sizes = p.heads, RANK, ROTATED, p.page_size, True, p.scale, p.dtype, p.cache_dtype

    def plan() -> None:
        wrapper.plan(p.trees.cu_nodes, offsets, indices, p.seq_lens, *sizes)

    def run(copy: int) -> Tensor:
        return wrapper.run(*(part for x in (p.q, p.k[copy][:, :, 0]) for part in x.split([RANK, ROTATED], -1)))

    plan()
    return Way(run, plan)


# The op --------------------------------------------------------------------------------------------------------------


def memory_of(shape: Shape) -> int:
    """The copies of the cache, dense K and V, and SDPA's mask and scores; not the expanded heads, which ask by
    themselves."""
    lengths = lengths_of(shape)
    rows = nodes_of(shape["tree"]) * int(shape["heads"].split("/")[0])
    dense = max(lengths) * len(lengths) * (4 * ROW + 12 * rows)
    return max(kv_bytes_of(shape, ROW), 2 * L3_BYTES["cpu"]) * 2 + dense


def check(problem: LatentProblem, ours: Way, theirs: Way) -> None:
    expected = ours.run(0).float()
    check_mean_error("output", expected, theirs.run(0).reshape(expected.shape).float(), 0.03)


LATENT_ATTENTION = Op(
    name="latent_attention",
    base={"batch": 4, "length": 4096, "tree": "binary 8", "heads": "128/1", "page_size": 64, **LAYOUT},
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
    problem=LatentProblem,
    peers=[*OURS, sdpa_on_expanded_heads, sdpa_on_gathered_rows, flash_mla, flashinfer_mla],
    memory=memory_of,
    check=check,
    unsupported=unsupported,
)
OPS = [LATENT_ATTENTION]
