"""Parameters, dtypes and random streams that the tests of sampling share."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_TYPES = [torch.float32, torch.float16, torch.bfloat16]
SAMPLINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 2.5, "top_k": 7},
    {"top_k": 1},
    {"top_p": 0.9},
    {"top_p": 0.35, "temperature": 1.4},
    {"top_p": 1e-6},
    {"min_p": 0.07},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 1.2},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 1.2, "filter_order": "joint"},
    {"top_k": 5, "top_p": 0.95, "filter_order": "joint"},
]


def random_words(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))
