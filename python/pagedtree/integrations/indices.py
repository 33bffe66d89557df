"""Indices that callers pass to adapters: any value is allowed, and invalid ones have no effect."""

from __future__ import annotations

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


def as_int32(values: Tensor) -> Tensor:
    """Returns int32, saturating: larger values become the largest, negative ones stay negative."""
    return values.clamp(-1, INT32_MAX).int() if values.dtype == torch.int64 else values.int()


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """Returns table[rows], [n, width]; -1 where the table has no such row."""
    if table.shape[0] == 0:
        return table.new_full((rows.shape[0], *table.shape[1:]), -1)
    is_row = (rows >= 0) & (rows < table.shape[0])
    return torch.where(is_row[:, None], table[torch.where(is_row, rows, 0).long()], -1)
