"""The packed pass of a transformers model, as its attention layers see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from pagedtree.generation.paged_step import PagedStep
from pagedtree.integrations.transformers.packed_mask import PackedMask

__all__ = ["PackedPass", "current_pass", "running_pass"]


@dataclass(eq=False)
class PackedPass:
    """Where the layers write and read keys and values, and their masks."""

    step: PagedStep
    mask: PackedMask = field(init=False)

    def __post_init__(self) -> None:
        self.mask = PackedMask(self.step.slots.shape[0], self.step.slots.device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the pass of "pagedtree" models inside the block."""
        token = current_pass.set(self)
        _running.append(self)
        try:
            yield
        finally:
            _running.remove(self)
            current_pass.reset(token)


current_pass: ContextVar[PackedPass | None] = ContextVar("pagedtree_pass", default=None)
# The passes of all threads. torch.compile guards this list, but cannot trace a context variable.
_running: list[PackedPass] = []


def running_pass() -> PackedPass | None:
    return current_pass.get() if _running else None
