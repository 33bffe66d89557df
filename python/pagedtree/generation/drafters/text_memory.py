"""Look-ups in former texts."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedtree import _C
from pagedtree._arguments import refusal

# Places of a hash chain that a look-up visits at most.
MAX_PLACES = 16
# Constants of the 64-bit hash.
FACTOR, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
NO_TOKEN = -1
MAX_NGRAM, MAX_LENGTH = 64, 1024

# One lock for all memories, so that copies need none. A forked process gets complete texts and a free lock.
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class TextMemory:
    """A ring buffer of the newest `max_tokens` tokens of texts, with hash chains as in LZ77 compressors.

    Places whose last `context` tokens have the same hash form a chain, newest first, of which a look-up visits at most
    16. A token takes 20 to 28 bytes. Threads may share it; it can be pickled. max_ngram: longest match counted.
    """

    def __init__(self, max_tokens: int, *, context: int = 4, max_ngram: int = 16) -> None:
        for name, value, least, most in (
            ("max_tokens", max_tokens, 1, 1 << 30),
            ("context", context, 1, MAX_NGRAM),
            ("max_ngram", max_ngram, context, MAX_NGRAM),
        ):
            if not least <= value <= most:
                raise refusal(name, f"{least} to {most}", value)
        self.max_tokens, self.context, self.max_ngram = max_tokens, context, max_ngram
        bits = max((max_tokens - 1).bit_length(), 1)  # about one entry of the table for each token
        self._shift = 64 - bits
        # Look-ups read past the newest token, so the gap between newest and oldest holds no tokens.
        self._size = max_tokens + MAX_NGRAM + MAX_LENGTH
        self._tokens = np.full(self._size, NO_TOKEN, dtype=np.int32)
        self._before = np.full(self._size, -1, dtype=np.int64)  # previous place of the chain
        self._newest = np.full(1 << bits, -1, dtype=np.int64)  # head of the chain, by hash
        self._count = 0  # tokens ever added; a place is a value of this counter

    def __getstate__(self) -> dict[str, Any]:
        with _lock:  # other threads may be adding
            return copy.deepcopy(vars(self))

    def __len__(self) -> int:
        return min(self._count, self.max_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        text = np.asarray(tokens, dtype=np.int32)[max(len(tokens) - self.max_tokens + 1, 0) :]
        if len(text) < self.context:
            return
        with _lock:
            run = np.concatenate([[NO_TOKEN], text])  # separates the text from the one before it
            places = np.arange(self._count, self._count + len(run))
            self._tokens[places % self._size] = run
            self._count += len(run)
            self._tokens[np.arange(self._count, self._count + MAX_NGRAM + MAX_LENGTH) % self._size] = NO_TOKEN
            ends = places[self.context :]
            hashes = self._hashes(text)
            # A stable sort makes each place's predecessor in its chain its neighbour.
            order = np.argsort(hashes, kind="stable")
            hashes, ends = hashes[order], ends[order]
            is_first = np.concatenate([[True], hashes[1:] != hashes[:-1]])
            before = np.where(is_first, self._newest[hashes], np.concatenate([[-1], ends[:-1]]))
            self._before[ends % self._size] = before
            is_last = np.concatenate([is_first[1:], [True]])
            self._newest[hashes[is_last]] = ends[is_last]

    def continuations(self, end: Sequence[int], length: int, most: int) -> NDArray[np.int64]:
        """Returns the continuations of this text's end in former texts: int64 [n, max_ngram + length + 1], n <= `most`.

        A row has the tokens up to the match, then `length` (at most 1024) tokens after it; -1 where there are none,
        between two texts, and at its end. The best row is last: longest match, then the most frequent next token, then
        the newest. end: the last `max_ngram` tokens of a text, or fewer.
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
        values = text.astype(np.uint64)
        count = len(values) - self.context + 1
        total = np.zeros(count, dtype=np.uint64)
        for i in range(self.context):
            total = (total ^ values[i : i + count]) * np.uint64(FACTOR)
            total ^= total >> np.uint64(29)
        return ((total * np.uint64(FACTOR)) >> np.uint64(self._shift)).astype(np.int64)

    def _hash_of(self, tokens: Sequence[int]) -> int:
        """Returns the hash of `context` tokens without numpy's call overhead."""
        total = 0
        for token in tokens:
            total = (total ^ token) * FACTOR & MASK
            total ^= total >> 29
        return (total * FACTOR & MASK) >> self._shift
