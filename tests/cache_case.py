from __future__ import annotations

import numpy as np
import torch
from step_case import int32
from torch import Tensor

from pagedtree import PreparedCompaction

FP8 = torch.float8_e4m3fn


def payload(shape: tuple[int, ...], dtype: torch.dtype, layer: int, device: torch.device) -> Tensor:
    """Returns bytes that identify slot, layer, head and dimension; NaN patterns too."""
    count = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(layer << 40)) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((mixed >> np.uint64(53)).astype(np.uint8)).view(dtype).view(shape).to(device)


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def prepared_compact(caches: list[Tensor], *moves: Tensor, **named: Tensor) -> Tensor:
    """Runs `PreparedCompaction`, which prepares nothing in grad mode."""
    with torch.inference_mode():
        return PreparedCompaction(caches)(*moves, **named)


def compact_arguments(device: torch.device) -> dict:
    return {
        "caches": [payload((4, 2, 3), torch.float32, i, device) for i in range(2)],
        "page_table": int32([[0, 1], [2, 3]], device),
        "start": int32([0, 0], device),
        "accept_index": int32([[0, 2, 3], [0, 1, 2]], device),
        "num_accepted": int32([2, 2], device),
    }
