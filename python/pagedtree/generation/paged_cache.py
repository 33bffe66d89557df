"""The pages of sequences in a key/value cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedtree import PreparedCompaction
from pagedtree._arguments import refusal
from pagedtree.generation.recurrent_states import RecurrentStates


class PagedCache:
    """`num_pages` pages of `page_size` tokens in every layer; sequences, identified by an int, own or share them.

    A page has the same number in every layer. `fork` shares whole written pages; later tokens are computed again.

    segment: of the plans of attention over it. states: of recurrent layers, if any. pages_in_use, peak_pages: pages
    held now, and at most so far. pages_taken: how often a page was taken from the pool, not shared.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        device: torch.device,
        is_recurrent: bool = False,
        segment: int | None = None,
    ) -> None:
        if page_size < 1 or num_pages < 1:
            raise refusal("num_pages, page_size", "at least 1", f"{num_pages} and {page_size}")
        self.num_pages, self.page_size, self.device, self.segment = num_pages, page_size, device, segment
        self.peak_pages = self.pages_taken = 0
        self.states = RecurrentStates(device) if is_recurrent else None
        self._layers: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._compaction: PreparedCompaction | None = None  # of the current tensors
        self._tables: dict[int, list[int]] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def pages_in_use(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def layer(self, index: int, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the layer's caches [num_pages, page_size, Hkv, D] for k and v [T, Hkv, D], created at first use. A
        latent layer, whose v is None, has one cache and None."""
        if index not in self._layers:
            self._layers[index] = (self._cache_of(k), self._cache_of(v) if v is not None else None)
            self._compaction = None
        return self._layers[index]

    def tensors(self) -> list[Tensor]:
        return [tensor for pair in self._layers.values() for tensor in pair if tensor is not None]

    def compact(self, page_table: Tensor, start: Tensor, accept_index: Tensor, num_accepted: Tensor) -> None:
        """Compacts the rows of accepted paths in all layers that ran, like `compact_kv`."""
        if self._compaction is None:
            self._compaction = PreparedCompaction(self.tensors())
        self._compaction(page_table, start, accept_index, num_accepted)

    def pages(self, sequence: int) -> list[int]:
        return self._tables.get(sequence, [])

    def reserve(self, sequence: int, num_tokens: int) -> bool:
        """Reserves pages for `num_tokens` tokens; changes nothing and returns False if the pool has too few."""
        table = self._tables.setdefault(sequence, [])
        shortage = self.pages_for(num_tokens) - len(table)
        if shortage > len(self._free):
            return False
        for _ in range(shortage):
            page = self._free.pop()
            self._holders[page] = 1
            table.append(page)
        self.pages_taken += max(shortage, 0)
        self.peak_pages = max(self.peak_pages, self.pages_in_use)
        return True

    def reserve_growing(self, sequence: int, num_tokens: int) -> None:
        """Reserves pages for `num_tokens` tokens; at least doubles the pool if it has too few."""
        if not self.reserve(sequence, num_tokens):
            self.grow(max(self.num_pages, self.pages_for(num_tokens)))
            self.reserve(sequence, num_tokens)

    def grow(self, num_pages: int) -> None:
        self._free[:0] = range(self.num_pages + num_pages - 1, self.num_pages - 1, -1)
        self._holders += [0] * num_pages
        self.num_pages += num_pages
        for index, (k_cache, v_cache) in self._layers.items():
            self._layers[index] = (self._grown(k_cache), self._grown(v_cache) if v_cache is not None else None)
        self._compaction = None

    def trim(self, sequence: int, num_tokens: int) -> None:
        """Gives back the sequence's pages past its first `num_tokens` tokens."""
        table = self._tables.get(sequence, [])
        keep = self.pages_for(num_tokens)
        self._drop(table[keep:])
        del table[keep:]

    def release(self, sequence: int) -> None:
        """Gives back all pages and states of the sequence."""
        self._drop(self._tables.pop(sequence, []))
        if self.states is not None:
            self.states.release(sequence)

    def fork(self, source: int, sequence: int, num_tokens: int) -> None:
        """Shares the first `num_tokens` tokens of `source` with a new sequence: whole pages, no copy. Recurrent states
        are copied from the ones kept after these tokens (`RecurrentStates.keep_prefix`)."""
        if num_tokens % self.page_size or self._tables.get(sequence):
            raise refusal("num_tokens", "whole pages, for a sequence without pages", num_tokens)
        pages = self._tables[source][: num_tokens // self.page_size]
        for page in pages:
            self._holders[page] += 1
        self._tables[sequence] = list(pages)
        if self.states is not None:
            self.states.fork(source, sequence)

    def page_table(self, sequences: Sequence[int], first_page: Sequence[int] | None = None) -> Tensor:
        """Returns int32 [B, max_pages] on the cache's device; row b starts at page `first_page[b]` of its sequence."""
        first = first_page if first_page is not None else [0] * len(sequences)
        rows = [self._tables.get(sequence, [])[begin:] for sequence, begin in zip(sequences, first, strict=True)]
        return self.table_of(rows)

    def table_of(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns int32 [B, longest row] on the cache's device: these page ids, padded with 0."""
        width = max((len(row) for row in rows), default=0)
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int32).view(len(rows), width).to(self.device, non_blocking=True)

    def _cache_of(self, states: Tensor) -> Tensor:
        shape = (self.num_pages, self.page_size, *states.shape[1:])
        try:
            return states.new_empty(shape)
        except RuntimeError as error:  # includes torch.OutOfMemoryError; the CPU raises a plain RuntimeError
            wanted, size = "a cache that fits in memory", math.prod(shape) * states.element_size() / 2**30
            found = f"{self.num_pages} pages of {self.page_size} tokens, {size:.1f} GiB for a layer's keys or values"
            raise refusal("num_pages, page_size", wanted, found, torch.OutOfMemoryError) from error

    def _grown(self, cache: Tensor) -> Tensor:
        grown = cache.new_empty((self.num_pages, *cache.shape[1:]))
        grown[: cache.shape[0]] = cache
        return grown

    def _drop(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
