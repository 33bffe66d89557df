"""Logits, trees and drafts, equal on every rank, whole and sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pagedtree import DraftTree, TreeBatch
from pagedtree.distributed import VocabShards


@dataclass
class Case:
    logits: Tensor
    drafts: Tensor
    trees: TreeBatch
    seeds: Tensor
    positions: Tensor

    @property
    def streams(self) -> dict[str, Tensor]:
        return {"seeds": self.seeds, "positions": self.positions}


def columns(fractions: list[float], vocab: int, rank: int) -> int:
    sizes = [int(fraction * vocab) for fraction in fractions]
    return [*sizes, vocab - sum(sizes)][rank]


def shards_of(group: dist.ProcessGroup, fractions: list[float], vocab: int) -> VocabShards:
    return VocabShards(columns(fractions, vocab, dist.get_rank(group)), group=group)


def make_case(
    vocab: int, dtype: torch.dtype, seed: int, parents: list[list[int]] | None = None, device: str = "cpu"
) -> Case:
    """Builds rows with ties, NaN, infinities; drafts are often likeliest."""
    generator = torch.Generator().manual_seed(seed)
    parents = parents or [[-1, 0, 0, 1, 1, 2, 3], [-1], [-1, 0, 1, 2], [-1, 0, 0, 0, 2, 2]]
    trees = TreeBatch.from_trees([DraftTree(p) for p in parents], device=device)
    rows = trees.parents.shape[0]
    logits = (torch.randn(rows, vocab, generator=generator) * 3).round(decimals=1)
    logits[1, ::3] = float("nan")
    logits[2, vocab // 2] = float("inf")
    logits[3, 1::2] = -float("inf")
    logits[4] = float("-inf")
    logits[5] = 0.5
    logits[6, vocab // 3 :] = 7.0
    logits = logits.to(dtype)
    best = logits.float().nan_to_num(-1e9).topk(min(3, vocab), dim=1).indices
    firsts = trees.cu_nodes[:-1].tolist()
    parent_rows = torch.cat([torch.tensor(p).clamp(min=0) + b for p, b in zip(parents, firsts, strict=True)])
    choice = torch.randint(0, best.shape[1], (rows,), generator=generator)
    drafts = best[parent_rows, choice]
    drafts[torch.rand(rows, generator=generator) < 0.15] = -1
    words = torch.randint(-(2**62), 2**62, (2, len(parents)), generator=generator)
    logits, drafts, seeds, positions = (t.to(device) for t in (logits, drafts, *words))
    return Case(logits, drafts, trees, seeds, positions)
