"""Code that test files share; tests/README.md lists the modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


def int32(values: list, device: torch.device | str | None = None) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def int64(values: list, device: torch.device | str | None = None) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def offsets_of(sizes: Iterable[int], device: torch.device | str | None = None) -> Tensor:
    return int32([0, *accumulate(sizes)], device)


def seeded(seed: int) -> torch.Generator:
    """Returns a generator on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
