"""Former texts, in which what follows the end of another text is looked up."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedtree import _C

__all__ = ["TextMemory"]

# Places with the same hash that a look-up compares at most, the newest first.
MAX_PLACES = 16
# Of the hash, which is of 64 bits.
FACTOR, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
NO_TOKEN = -1
MAX_NGRAM, MAX_LENGTH = 64, 1024

# Of all memories, so that a copy has no lock of its own. A forked process gets whole texts, and a lock that is free.
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class TextMemory:
    """A ring of the newest `max_tokens` tokens of texts, in which each place knows the one before it that ends alike.

    Places whose last `context` tokens have the same hash are a chain, from the newest to the oldest, as in LZ77's
    compressors: a look-up walks along at most 16 of them, whatever the memory holds. It takes 20 to 28 bytes a token.
    Threads may share it, and pickle stores it.

    Args:
        max_tokens: what is older than so many tokens is forgotten.
        context: so many tokens have to be equal.
        max_ngram: equal tokens beyond so many do not count.
    """

    def __init__(self, max_tokens: int, *, context: int = 4, max_ngram: int = 16) -> None:
        for name, value, least, most in (
            ("max_tokens", max_tokens, 1, 1 << 30),
            ("context", context, 1, MAX_NGRAM),
            ("max_ngram", max_ngram, context, MAX_NGRAM),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")
        self.max_tokens, self.context, self.max_ngram = max_tokens, context, max_ngram
        bits = max((max_tokens - 1).bit_length(), 1)  # about one entry of the table for each token
        self._shift = 64 - bits
        # Behind the newest token, and so in front of the oldest, a part of the ring has no token: look-ups read there.
        self._size = max_tokens + MAX_NGRAM + MAX_LENGTH
        self._tokens = np.full(self._size, NO_TOKEN, dtype=np.int32)
        self._before = np.full(self._size, -1, dtype=np.int64)  # the place before it in its chain
        self._newest = np.full(1 << bits, -1, dtype=np.int64)  # of each hash
        self._count = 0  # tokens that were ever added; a place is such a number

    def __getstate__(self) -> dict[str, Any]:
        with _lock:  # what others add meanwhile comes behind the copy
            return copy.deepcopy(vars(self))

    def __len__(self) -> int:
        """Tokens that it holds."""
        return min(self._count, self.max_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Takes in a text, or as much of its end as there is room for."""
        text = np.asarray(tokens, dtype=np.int32)[max(len(tokens) - self.max_tokens + 1, 0) :]
        if len(text) < self.context:
            return
        with _lock:
            run = np.concatenate([[NO_TOKEN], text])  # what stands in front of a text is another one's
            places = np.arange(self._count, self._count + len(run))
            self._tokens[places % self._size] = run
            self._count += len(run)
            self._tokens[np.arange(self._count, self._count + MAX_NGRAM + MAX_LENGTH) % self._size] = NO_TOKEN
            ends = places[self.context :]
            hashes = self._hashes(text)
            # Equal hashes beside each other, in the order of their places: each one's predecessor is its neighbour.
            order = np.argsort(hashes, kind="stable")
            hashes, ends = hashes[order], ends[order]
            is_first = np.concatenate([[True], hashes[1:] != hashes[:-1]])
            before = np.where(is_first, self._newest[hashes], np.concatenate([[-1], ends[:-1]]))
            self._before[ends % self._size] = before
            is_last = np.concatenate([is_first[1:], [True]])
            self._newest[hashes[is_last]] = ends[is_last]

    def continuations(self, end: Sequence[int], length: int, most: int) -> NDArray[np.int64]:
        """Returns what stood at the places where former texts end as this one does: int64 [n, max_ngram + length + 1],
        n <= `most`.

        A row has the tokens up to the place, of which the last ones are equal, then `length` tokens behind it; -1 where
        there are none, between two texts, and at its end. The best row is the last one: of more equal tokens, then of a
        next token that more places have, then the newest.

        end: the last `max_ngram` tokens of a text, or fewer. length: at most 1024.
        """
        if len(end) < self.context:
            return np.empty((0, self.max_ngram + length + 1), dtype=np.int64)
        hashed = self._hash_of(end[-self.context :])
        with _lock:
            return _C.former_continuations(
                self._tokens,
                self._before,
                self._newest.item(hashed),
                self._count - self.max_tokens,
                end[-self.max_ngram :],
                self.context,
                self.max_ngram,
                length,
                most,
                MAX_PLACES,
            )

    def _hashes(self, text: NDArray[np.int32]) -> NDArray[np.int64]:
        """Of each `context` tokens."""
        values = text.astype(np.uint64)
        count = len(values) - self.context + 1
        total = np.zeros(count, dtype=np.uint64)
        for i in range(self.context):
            total = (total ^ values[i : i + count]) * np.uint64(FACTOR)
            total ^= total >> np.uint64(29)
        return ((total * np.uint64(FACTOR)) >> np.uint64(self._shift)).astype(np.int64)

    def _hash_of(self, tokens: Sequence[int]) -> int:
        """Returns the same of `context` tokens; a dozen calls of numpy would take longer than all the rest."""
        total = 0
        for token in tokens:
            total = (total ^ token) * FACTOR & MASK
            total ^= total >> 29
        return (total * FACTOR & MASK) >> self._shift
