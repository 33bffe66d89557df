"""Attention over a paged cache, with and without a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from named_trees import nodes_of, tree_named
from suite import Shape, Way, peer
from torch import Tensor

import pagedtree
from pagedtree.check.case import Place, environment
from pagedtree.check.cases import instructions_sm90

L3_BYTES = {"cpu": 64 << 20, "cuda": 128 << 20}  # exceeded by copies of the data
LAYOUT = {"dtype": "bfloat16", "cache": "same", "lengths": "uniform", "threads": 0}


def lengths_of(shape: Shape) -> list[int]:
    """Returns `batch` times `length`; "ragged": the same sum in unequal parts; or the listed lengths."""
    batch, length = shape["batch"], shape["length"]
    if shape["lengths"] == "uniform":
        return [length] * batch
    if shape["lengths"] != "ragged":
        return [int(text) for text in shape["lengths"].split()]
    weights = [(0.35, 3.4, 0.13, 0.12)[b % 4] for b in range(batch)]
    total, nodes = batch * length, nodes_of(shape["tree"])
    lengths = [max(int(total * weight / sum(weights)), nodes) for weight in weights]
    return [*lengths[:-1], max(lengths[-1] + total - sum(lengths), nodes)]


def kv_bytes_of(shape: Shape, row: int) -> int:
    """row: columns per token and KV head."""
    size = getattr(torch, shape["dtype"]).itemsize if shape["cache"] == "same" else 1
    return sum(lengths_of(shape)) * int(shape["heads"].split("/")[1]) * row * size


class Problem:
    """One attention call: a tree of queries per sequence, pages in random order."""

    is_latent = False

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.lengths, self.tree, self.device = lengths_of(shape), tree_named(shape["tree"]), device
        self.batch, self.max_length = len(self.lengths), max(self.lengths)
        self.is_prefill = shape["tree"].startswith("prefill")
        self.heads, self.kv_heads = (int(count) for count in shape["heads"].split("/"))
        self.head_dim, self.page_size = shape["head_dim"], shape["page_size"]
        self.scale = self.head_dim**-0.5
        self.dtype = getattr(torch, shape["dtype"])
        self.cache_dtype = self.dtype if shape["cache"] == "same" else torch.float8_e4m3fn
        # One copy if no cache holds half of it, else enough that none stays in a cache.
        l3 = L3_BYTES[device.type]
        self.copies = 1 if self.kv_bytes >= 4 * l3 else min(8, -(-l3 // self.kv_bytes) + 1)
        self.generator = torch.Generator(device).manual_seed(0)
        n = self.tree.num_nodes
        pages = [-(-length // self.page_size) for length in self.lengths]
        cache_shape = (sum(pages), self.page_size, self.kv_heads, self.head_dim)
        self.q = self.queries(self.batch * n)
        self.k = [self.random(*cache_shape).to(self.cache_dtype) for _ in range(self.copies)]
        self.v = [self.values(k) for k in self.k]
        order = torch.randperm(cache_shape[0], generator=self.generator, device=device).int()
        self.page_table = order.new_zeros((self.batch, max(pages)))
        for b, (row, count) in enumerate(zip(order.split(pages), pages, strict=True)):
            self.page_table[b, :count] = row
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self.trees = pagedtree.TreeBatch.from_trees([self.tree] * self.batch, device=device)
        self.plan_arguments = {"num_q_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        self.plan_arguments |= {"head_dim_v": self.head_dim_v, "latent": self.is_latent}
        self.plan_arguments |= {"page_size": self.page_size, "max_seqlen_q": n}

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator, device=self.device, dtype=self.dtype)

    def queries(self, tokens: int) -> Tensor:
        return self.random(tokens, self.heads, self.head_dim)

    def values(self, k: Tensor) -> Tensor:
        return self.random(*k.shape).to(self.cache_dtype)

    @property
    def head_dim_v(self) -> int:
        return self.head_dim

    def visible(self) -> Tensor:
        """bool [1 or B, n, L]: nodes see the prefix and their ancestors."""
        tree, n = torch.from_numpy(self.tree.mask).to(self.device), self.tree.num_nodes
        lengths = self.lengths if len(set(self.lengths)) > 1 else self.lengths[:1]
        mask = torch.zeros(len(lengths), n, self.max_length, dtype=torch.bool, device=self.device)
        for b, length in enumerate(lengths):
            mask[b, :, : length - n] = True
            mask[b, :, length - n : length] = tree
        return mask

    def expect_same_dtype(self) -> None:
        if self.cache_dtype != self.dtype:
            raise ValueError("its cache has the queries' dtype")

    def gathered(self, copy: int) -> tuple[Tensor, Tensor]:
        """[B, Hkv, L, D] each."""
        index, caches = self.page_table.long(), (self.k[copy], self.v[copy])
        k, v = (cache[index].flatten(1, 2)[:, : self.max_length].transpose(1, 2) for cache in caches)
        return k.to(self.dtype), v.to(self.dtype)

    def padded_queries(self) -> Tensor:
        """[B, Hq, T, D]."""
        return self.q.view(self.batch, -1, self.heads, self.head_dim).transpose(1, 2)

    @property
    def kv_bytes(self) -> int:
        """Latent rows are K and V."""
        row = self.head_dim if self.is_latent else self.head_dim + self.head_dim_v
        return sum(self.lengths) * self.kv_heads * row * self.cache_dtype.itemsize

    @property
    def bytes(self) -> int:
        """Counts the cache once, q and the output."""
        both = self.head_dim + self.head_dim_v
        return self.kv_bytes + self.q.shape[0] * self.heads * both * self.dtype.itemsize

    @property
    def flops(self) -> int:
        n = self.tree.num_nodes
        pairs = sum(n * (length - n) for length in self.lengths) + self.batch * int(self.tree.mask.sum())
        return 2 * self.heads * (self.head_dim + self.head_dim_v) * pairs


def tree_way(p: Problem, *, has_mask: bool = True, segment: int | None = None) -> Way:
    def plan() -> Tensor:
        return pagedtree.attention_plan(p.seq_lens, p.trees.cu_nodes, **p.plan_arguments, segment=segment)

    mask, schedule = p.trees.mask if has_mask and not p.is_prefill else None, plan()
    where = p.page_table, p.seq_lens, p.trees.cu_nodes, mask
    how = {"max_seqlen_q": p.tree.num_nodes, "scale": p.scale, "plan": schedule}
    return Way(lambda copy: pagedtree.tree_attention(p.q, p.k[copy], p.v[copy], *where, **how), plan)


@peer("pagedtree", plans_on_device=True)
def paged_tree(p: Problem) -> Way:
    return tree_way(p)


@peer("pagedtree causal", is_other_problem=True, plans_on_device=True)
def paged_tree_causal(p: Problem) -> Way:
    return tree_way(p, has_mask=False)


def not_hopper() -> str | None:
    return instructions_sm90.absent(Place(torch.device("cuda"), "cuda"))


@peer("pagedtree by wgmma", when=not_hopper, plans_on_device=True)
def paged_tree_wgmma(p: Problem) -> Way:
    """Forces the Hopper kernel (heads of more than 32 rows), whatever its self-test says."""

    def by_wgmma(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with environment("PAGEDTREE_ENGINE", "wgmma"):
                return function(*arguments)

        return call

    way = by_wgmma(tree_way)(p)
    return Way(by_wgmma(way.run), by_wgmma(way.plan))


@peer("pagedtree in segments", plans_on_device=True)
def paged_tree_segments(p: Problem) -> Way:
    """With segments of 2,048 keys: what the same bits in every batch cost."""
    return tree_way(p, segment=2048)


OURS = [paged_tree, paged_tree_causal, paged_tree_wgmma, paged_tree_segments]


def unsupported(shape: Shape, device: torch.device) -> str | None:
    if shape["dtype"] == "float32" and device.type == "cuda":
        return "the CUDA backend takes float16 and bfloat16"
    return None
