"""Counted exchanges of integers between ranks, and a check that all ranks make the same call."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pagedtree._arguments import refusal

__all__ = ["Group", "GroupError", "Traffic"]


class GroupError(RuntimeError):
    """The other ranks did not answer: one has died, left, or is in another call."""


@dataclass
class Traffic:
    """Traffic of this rank, in 64-bit words that it passed in.

    Attributes:
        exchanges: collectives.
        reduced: words in max or sum reductions.
        gathered: words in all-gathers.
    """

    exchanges: int = 0
    reduced: int = 0
    gathered: int = 0

    @property
    def words(self) -> int:
        """Words in all, reduced and gathered."""
        return self.reduced + self.gathered

    def bytes_sent(self, num_ranks: int) -> int:
        """Returns the bytes that each of `num_ranks` ranks sends around a ring, twice for reduced words."""
        return 8 * (2 * self.reduced * (num_ranks - 1) // num_ranks + self.gathered * (num_ranks - 1))


class Group:
    """A torch.distributed group as the verify ops use it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise refusal("group", "torch.distributed to be initialised (dist.init_process_group)")
        if dist.get_rank(group) < 0:
            raise refusal("group", "a group that this rank belongs to")
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()

    def maximum(self, words: Tensor, what: str) -> Tensor:
        """Returns the maximum of each word over the ranks, in place."""
        return self._reduce(words, dist.ReduceOp.MAX, what)

    def total(self, words: Tensor, what: str) -> Tensor:
        """Returns the sum of each word over the ranks, in place."""
        return self._reduce(words, dist.ReduceOp.SUM, what)

    def every(self, words: Tensor, what: str) -> Tensor:
        """Returns [P, ...]: the words of each rank."""
        words = words.contiguous()
        gathered = words.new_empty((self.size, *words.shape))
        if words.numel():
            with self._answered(what):
                dist.all_gather(list(gathered.unbind()), words, group=self.group)
            self.traffic.exchanges += 1
            self.traffic.gathered += words.numel()
        return gathered

    def agree(self, call: str, arguments: dict[str, Any]) -> None:
        """Raises ValueError on every rank if one of them has other arguments, or another call.

        Does nothing for tensors on a GPU unless PAGEDTREE_CHECK=1, as it would synchronise.
        """
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        on_gpu = any(tensor.device.type != "cpu" for tensor in tensors)
        if on_gpu and os.environ.get("PAGEDTREE_CHECK", "") in ("", "0"):
            return
        assert len(arguments) < _MAX_ARGUMENTS
        names = [call, *arguments]
        digests = [_digest(value) for value in (call, *arguments.values())]
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        digest_row = torch.tensor(digests + [0] * (_MAX_ARGUMENTS - len(digests)), device=device, dtype=torch.int64)
        for rank, row in enumerate(self.every(digest_row, f"{call}: comparing arguments").tolist()):
            different = [name for name, a, b in zip(names, row, digests, strict=False) if a != b]
            if not different:
                continue
            name = different[0] if different[0] != call else "the call"
            found = f"something else on rank {rank} than on rank {self.rank}"
            raise refusal(name, "the same on all ranks of the group", found, function=call)

    def _reduce(self, words: Tensor, op: Any, what: str) -> Tensor:
        if words.numel():
            with self._answered(what):
                dist.all_reduce(words, op, group=self.group)
            self.traffic.exchanges += 1
            self.traffic.reduced += words.numel()
        return words

    @contextmanager
    def _answered(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise GroupError(
                f"{what}: rank {self.rank} of {self.size} got no answer from the others; one of them has died, left,"
                f" or is in another call ({str(error).splitlines()[0]})"
            ) from error


_MAX_ARGUMENTS = 48


def _digest(value: Any) -> int:
    """Returns 63 bits that distinguish values: tensors by dtype, shape and content, others by their repr."""
    if isinstance(value, Tensor):
        elements = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        text = f"{value.dtype}{tuple(value.shape)}".encode() + elements.view(torch.uint8).numpy().tobytes()
    else:
        text = repr(value).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
