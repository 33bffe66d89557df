"""Assignment of logits columns to ranks."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from pagedtree._arguments import refusal
from pagedtree.distributed.group import Group, Traffic

__all__ = ["VocabShards"]


class VocabShards:
    """A vocabulary in contiguous shards: rank r's columns follow rank r - 1's. Shards may differ in size.

    A collective call; exchanges only the numbers of columns.

    Args:
        num_tokens: columns that this rank holds; any number, also 0. Pass padded logits as `logits[:, :num_tokens]`.
        group: a torch.distributed group; default all ranks.
        device: device of the group's collectives, "cpu" for gloo, the rank's GPU for NCCL.

    Attributes:
        rank, num_ranks: this rank in the group, and the group's size.
        num_tokens, first_token: this rank's columns are the ids first_token .. first_token + num_tokens - 1.
        vocab: the columns of all ranks together, 1..2^20.
        traffic: a `Traffic` that counts this rank's exchanges; it may be replaced.

    Raises ValueError without torch.distributed, or for a vocabulary out of range; GroupError if a rank does not answer.
    """

    def __init__(
        self, num_tokens: int, *, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if num_tokens < 0:
            raise refusal("num_tokens", ">= 0", num_tokens)
        self._group = Group(group)
        size_tensor = torch.tensor([num_tokens], device=device, dtype=torch.int64)
        sizes = [int(size) for size in self._group.every(size_tensor, "VocabShards").flatten().tolist()]
        self.rank, self.num_ranks = self._group.rank, self._group.size
        self.sizes = tuple(sizes)
        self.num_tokens = num_tokens
        self.first_token = list(accumulate(sizes, initial=0))[self.rank]
        self.vocab = sum(sizes)
        if not 1 <= self.vocab <= 2**20:
            raise refusal("num_tokens", "1..2^20 on all ranks together", self.vocab)
        self.traffic = Traffic()

    @property
    def traffic(self) -> Traffic:
        return self._group.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._group.traffic = traffic

    def own(self, columns: Tensor) -> Tensor:
        """Returns this rank's columns of a tensor [..., vocab]; a view."""
        return columns.narrow(-1, self.first_token, self.num_tokens)

    def gather_bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        """Returns the bytes that a rank sends to all-gather `num_rows` rows around a ring."""
        return num_rows * self.vocab * dtype.itemsize * (self.num_ranks - 1) // self.num_ranks
