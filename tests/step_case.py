from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedtree import TreeBatch, Verdict, build_trees


def int32(values: list, device: torch.device | str | None = None) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def int64(values: list, device: torch.device | str | None = None) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def batch_of(parents: list[list[int]], device, padding: int = 0, max_depth: int = 19) -> TreeBatch:
    cu_nodes = int32(np.concatenate([[0], np.cumsum([len(p) for p in parents])]).tolist(), device)
    flat = int32([node for p in parents for node in p] + [-1] * padding, device)
    return build_trees(flat, cu_nodes, max_nodes=20, max_depth=max_depth)


def commit_arguments(device) -> dict:
    return {
        "verdict": Verdict(int32([[0, 2]], device), int32([1], device), int64([[5, 6]], device), int32([0], device)),
        "trees": batch_of([[-1, 0, 0]], device, max_depth=1),
        "start": int32([4], device),
        "history": torch.zeros((1, 8), dtype=torch.int64, device=device),
        "history_lens": int32([3], device),
    }
