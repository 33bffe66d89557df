"""The states of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedtree._arguments import refusal


class RecurrentStates:
    """The states of every recurrent layer; a sequence, identified by an int, holds one per layer.

    A state has the same index in every layer. It is taken, zeroed, when a sequence is first read, and given back when
    the sequence is finished or evicted. Outcomes of one prompt get copies (`fork`) of the state kept after the shared
    pages (`keep_prefix`). num_states: states per layer; doubled when all are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_states, self._is_full = device, 0, False
        self._tensors: dict[tuple[int, str], Tensor] = {}
        self._free: list[int] = []
        self._indices: dict[int, int] = {}
        self._prefixes: dict[int, int] = {}
        self._holders: dict[int, int] = {}

    def __getitem__(self, name: tuple[int, str]) -> Tensor:
        """Returns the current states of this name; growing replaces the tensor."""
        return self._tensors[name]

    def tensor(self, name: tuple[int, str], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the states [num_states, *shape] of a layer, named by its layer_idx and a word; zeros at first use."""
        if name not in self._tensors:
            self._tensors[name] = torch.zeros((self.num_states, *shape), dtype=dtype, device=self.device)
        return self._tensors[name]

    def state_index(self, sequence: int) -> int:
        if sequence not in self._indices:
            self._indices[sequence] = self._take()
        return self._indices[sequence]

    def reserve(self, num_states: int) -> None:
        """Allocates this many states and fixes their addresses, for captured steps."""
        if self.num_states < num_states:
            self._grow(num_states - self.num_states)
        self._is_full = True

    def keep_prefix(self, sequence: int) -> None:
        """Keeps a copy of the current states for `fork`, until the sequence and all its forks are released."""
        self._drop_prefix(sequence)
        state = self._take()
        self._copy(self._indices[sequence], state)
        self._prefixes[sequence], self._holders[state] = state, 1

    def fork(self, source: int, sequence: int) -> None:
        state = self._prefixes[source]
        self._indices[sequence] = self._take()
        self._copy(state, self._indices[sequence])
        self._prefixes[sequence] = state
        self._holders[state] += 1

    def release(self, sequence: int) -> None:
        self._drop_prefix(sequence)
        index = self._indices.pop(sequence, None)
        if index is not None:
            self._free.append(index)

    def _take(self) -> int:
        if not self._free:
            if self._is_full:
                raise refusal("recurrent states", f"at most {self.num_states} to be taken", "one more", RuntimeError)
            self._grow(max(self.num_states, 1))
        index = self._free.pop()
        for states in self._tensors.values():
            states[index] = 0
        return index

    def _grow(self, added: int) -> None:
        self._free[:0] = range(self.num_states + added - 1, self.num_states - 1, -1)
        self.num_states += added
        for name, states in self._tensors.items():
            self._tensors[name] = torch.cat([states, states.new_zeros((added, *states.shape[1:]))])

    def _copy(self, source: int, target: int) -> None:
        for states in self._tensors.values():
            states[target] = states[source]

    def _drop_prefix(self, sequence: int) -> None:
        state = self._prefixes.pop(sequence, None)
        if state is None:
            return
        self._holders[state] -= 1
        if self._holders[state] == 0:
            del self._holders[state]
            self._free.append(state)
