"""Holders of a weight: only a model's own modules, or others, too."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WeightHolders", "can_count"]


def can_count() -> bool:
    """Returns whether this torch can count the references to a storage."""
    return hasattr(torch._C, "_storage_Use_Count")


class WeightHolders:
    """The holders of these modules' weights.

    More references than the modules' own plus a fresh weight's mean another holder. users: number of places in the
    modules, by tensor id.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.users = Counter(id(tensor) for module in modules for tensor in _tensors(module))
        starts = {id(tensor): _start(tensor) for module in modules for tensor in _tensors(module) if _is_dense(tensor)}
        self._starts, self._shared = Counter(starts.values()), _shared_memory()
        fresh = nn.Module()
        fresh.weight = nn.Parameter(torch.empty(1, dtype=torch.float32, device="cpu"))
        self._fresh = _references(fresh)

    def has_others(self, module: Any) -> bool:
        """Returns whether anything else holds the module's weight (dense, on the CPU) or its memory."""
        references, users, start = _references(module), self.users[id(module.weight)], _start(module.weight)
        is_whole = module.weight.untyped_storage().nbytes() == module.weight.nbytes and self._starts[start] == 1
        counts = references[0] - users + 1, *references[1:]
        is_referred_to = any(count > fresh_count for count, fresh_count in zip(counts, self._fresh, strict=True))
        return not is_whole or is_referred_to or any(start in addresses for addresses in self._shared)


def _references(module: Any) -> tuple[int, ...]:
    """Counts references to the module's weight and to its storage, and the tensors with this storage."""
    weight = module._parameters["weight"]
    storage = weight.untyped_storage()
    return sys.getrefcount(weight), sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shared_memory() -> list[range]:
    """Returns the addresses where other processes may write."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        ranges = [line.split(maxsplit=2)[:2] for line in maps]
    return [range(*(int(end, 16) for end in ends.split("-"))) for ends, flags in ranges if flags.endswith("s")]
