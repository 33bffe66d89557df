"""Dense attention in float32, and random paged sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from attention_case import random_tree
from device_case import placed
from torch import Tensor

from pagedtree import DraftTree


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float = 0.0, softcap: float = 0.0, sinks: Any = None
) -> tuple[Tensor, Tensor]:
    """Returns out [n, H, D], lse [n, H] in float32: q [n, H, D], k and v [s, Hkv, D], seen bool [n, s]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * (scale or q.shape[2] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1).T


def causal(n: int, s: int, window: int = 0) -> Tensor:
    """Returns bool [n, s]: the last n of s positions see at most `window` keys up to themselves."""
    query, key = torch.arange(s - n, s)[:, None], torch.arange(s)
    return (key <= query) & (key > query - window if window else torch.ones(1, dtype=torch.bool))


def tree_sees(tree: DraftTree, prefix: int) -> Tensor:
    """Returns bool [n, prefix + n]: nodes see the prefix and their ancestors."""
    ones = torch.ones(tree.num_nodes, prefix, dtype=torch.bool)
    return torch.cat([ones, placed(torch.from_numpy(tree.mask))], 1)


def random_trees(sizes: list[int], seed: int = 0) -> list[DraftTree]:
    rng = np.random.default_rng(seed)
    return [random_tree(rng, n) for n in sizes]


@dataclass
class Pages:
    """Random K and V, whole and in shuffled pages."""

    k: list[Tensor]  # [s, Hkv, D]
    v: list[Tensor]  # [s, Hkv, Dv]
    k_cache: Tensor  # [pages, page_size, Hkv, D]; NaN elsewhere
    v_cache: Tensor
    pages: list[list[int]]

    @classmethod
    def random(
        cls, lens: list[int], page_size: int, heads: int, dim: int, dtype: torch.dtype, dim_v: int | None = None
    ) -> Pages:
        with torch.device("cpu"):
            k, v, k_cache, v_cache, pages = cls._random(lens, page_size, heads, (dim, dim_v or dim), dtype)
        return cls([placed(x) for x in k], [placed(x) for x in v], placed(k_cache), placed(v_cache), pages)

    @staticmethod
    def _random(lens: list[int], page_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-s // page_size) for s in lens]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        caches = [torch.full((len(order), page_size, heads, dim), torch.nan, dtype=dtype) for dim in dims]
        rows: list[list[Tensor]] = [[], []]
        pages = []
        for s, count in zip(lens, counts, strict=True):
            pages.append([order.pop() for _ in range(count)])
            for side in range(2):
                values = torch.randn(s, heads, dims[side], generator=generator).to(dtype)
                rows[side].append(values)
                positions = torch.arange(s)
                caches[side][
                    torch.tensor(pages[-1], dtype=torch.int64)[positions // page_size], positions % page_size
                ] = values
        return *rows, *caches, pages

    def table(self) -> Tensor:
        """Returns int32 [B, max_pages], padded with invalid pages."""
        table = torch.full((len(self.pages), max(map(len, self.pages), default=0) + 1), -7, dtype=torch.int32)
        for b, pages in enumerate(self.pages):
            table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table


def close(out: Tensor, expected: Tensor) -> None:
    """Asserts closeness within `out`'s precision."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[out.dtype]
    torch.testing.assert_close(out.float(), expected.to(out.device), atol=tolerance, rtol=tolerance)
