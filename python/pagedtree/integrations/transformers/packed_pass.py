"""The packed pass of a transformers model, as its attention layers see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagedtree.generation.paged_step import PagedStep, Rotation
from pagedtree.integrations.transformers.packed_mask import PackedMask

__all__ = ["PackedPass", "current_pass"]


@dataclass
class PackedPass:
    """Where the layers write and read keys and values, and their masks. rotated: the layer's rotation, if the attention
    applies it."""

    step: PagedStep
    mask: PackedMask = field(init=False)
    rotated: Any = None
    _rotations: dict[int, tuple[Tensor, Rotation]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mask = PackedMask(self.step.slots.shape[0], self.step.slots.device)

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        """Returns the rotation by cos, sin [1, T, columns], the same angles in both halves."""
        if id(cos) not in self._rotations:
            half = cos.shape[-1] // 2
            table = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)
            positions = torch.arange(table.shape[0], device=table.device, dtype=torch.int64)
            self._rotations[id(cos)] = cos, Rotation(positions, table)
        return self._rotations[id(cos)][1]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the pass of "pagedtree" models inside the block."""
        token = current_pass.set(self)
        try:
            yield
        finally:
            current_pass.reset(token)


current_pass: ContextVar[PackedPass | None] = ContextVar("pagedtree_pass", default=None)
