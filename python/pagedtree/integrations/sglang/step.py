"""One forward pass in the attention backend's form."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Step"]


@dataclass
class Step:
    """One forward pass, for all layers; arguments of `tree_attention`."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    tree_mask: Tensor | None
    max_seqlen_q: int | None
    page_size: int
    plans: dict[int, Tensor] = field(default_factory=dict)  # by window
    over_rows: Step | None = None  # see of_rows

    def of_rows(self, count: int) -> Step:
        """Returns the same `count` queries over keys that are their own rows, in a cache with pages of one slot."""
        if self.over_rows is None:
            offsets, width = self.cu_seqlens_q, self.max_seqlen_q or count
            table = offsets[:-1, None] + torch.arange(width, dtype=torch.int32, device=offsets.device)
            self.over_rows = Step(table, offsets.diff(), offsets, None, width, page_size=1)
        return self.over_rows
