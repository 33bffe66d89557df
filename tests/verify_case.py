from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import DraftTree, TreeBatch, Verdict

MALFORMED, BAD_ROW = 1, 2


def batch_of(parents: list[list[int]], device: torch.device, **bounds) -> TreeBatch:
    return TreeBatch.from_trees([DraftTree(p) for p in parents], device=device, **bounds)


def streams(batch: int, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (2, batch), generator=generator).to(device)
    return {"seeds": words[0], "positions": words[1]}


def check(verdict: Verdict, b: int, path: list[int], tokens: list[int], status: int = 0) -> None:
    width = verdict.tokens.shape[1]
    padding = [-1] * (width - len(path))
    assert verdict.accept_index[b].tolist() == path + padding
    assert verdict.tokens[b].tolist() == tokens + padding
    assert verdict.num_accepted[b] == len(path) - 1
    assert verdict.status[b] == status


def check_bounds(verdict: Verdict, max_nodes: int, max_depth: int, vocab: int) -> None:
    """Asserts that paths descend within a tree with valid tokens."""
    for accepted, count, tokens in zip(
        verdict.accept_index.tolist(), verdict.num_accepted, verdict.tokens.tolist(), strict=True
    ):
        path = [node for node in accepted if node >= 0]
        assert path == sorted(set(path)) and len(path) <= max_depth + 1
        assert all(node < max_nodes for node in path)
        assert count == max(len(path) - 1, 0)
        assert all(0 <= token < vocab for token in tokens[: len(path)]) and set(tokens[len(path) :]) <= {-1}
