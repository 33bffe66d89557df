"""The texts of vLLM's requests, as stateful drafters see them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["Texts"]


class Texts:
    """vLLM's requests as drafters' sequences; `TreeDrafter` knows their ends."""

    def __init__(self) -> None:
        self._sequences: dict[str, GeneratedSequence] = {}
        self._next_index = 0

    def known(self, request_id: str) -> list[int]:
        sequence = self._sequences.get(request_id)
        return sequence.tokens if sequence is not None else []

    def sequences(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[GeneratedSequence]:
        for request_id, text in zip(request_ids, tokens, strict=True):
            if request_id not in self._sequences:
                index = self._next_index
                self._sequences[request_id] = GeneratedSequence(index, group=index, tokens=[], max_length=sys.maxsize)
                self._next_index += 1
            self._sequences[request_id].tokens = text.tolist()
        return [self._sequences[request_id] for request_id in request_ids]

    def forget(self, request_id: str, drafter: Any) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            drafter.forget(sequence)
