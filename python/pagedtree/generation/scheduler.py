"""The choice of sequences for the next pass."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from pagedtree._arguments import refusal
from pagedtree.generation.paged_cache import PagedCache


@dataclass(eq=False)  # sequences are never equal, and comparing their texts is slow
class GeneratedSequence:
    """One outcome of one prompt.

    Attributes:
        index: its place in the result; a lower one is older.
        group: the prompt; outcomes of one prompt share the pages of its first `shared_len` tokens.
        tokens: prompt and generated tokens. cached: how many of them, from the start, are in the cache.
        max_length: prompt_len, the initial number of tokens, + max_new_tokens.
    """

    index: int
    group: int
    tokens: list[int]
    max_length: int
    shared_len: int = 0
    cached: int = 0
    was_evicted: bool = False
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def root(self) -> int:
        """Position of the last known token, the root of the next tree."""
        return len(self.tokens) - 1

    @property
    def is_decoding(self) -> bool:
        return self.cached == self.root


@dataclass
class Batch:
    """One pass: sequences in prefill, with their number of tokens, and decoding ones. evicted: sequences that lost
    their pages before it."""

    prefill: list[tuple[GeneratedSequence, int]] = field(default_factory=list)
    decode: list[GeneratedSequence] = field(default_factory=list)
    evicted: list[GeneratedSequence] = field(default_factory=list)


class Scheduler:
    """Admits sequences in order as pages allow, and evicts the youngest when pages run out.

    An evicted sequence's tokens are read again later. The oldest unfinished sequence is never evicted for another, so
    every step makes progress.
    """

    def __init__(
        self,
        sequences: list[GeneratedSequence],
        cache: PagedCache,
        max_batch_tokens: int,
        max_sequences: int | None = None,
    ) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = len(sequences) if max_sequences is None else max_sequences
        self.waiting = list(sequences)
        self._running: dict[int, GeneratedSequence] = {}  # by index, in that order

    @property
    def running(self) -> list[GeneratedSequence]:
        return list(self._running.values())

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self._running

    def check_capacity(self, max_nodes: int) -> None:
        """Raises ValueError if some sequence could not be finished even with all pages."""
        for sequence in [*self._running.values(), *self.waiting]:
            num_pages = self.cache.pages_for(sequence.max_length - 2 + max_nodes)
            if num_pages > self.cache.num_pages:
                pages = f"at least {num_pages} pages of {self.cache.page_size} tokens for prompt {sequence.group}"
                wanted = f"{pages}, its max_new_tokens and a tree of {max_nodes} nodes"
                raise refusal("num_pages", wanted, self.cache.num_pages)

    def schedule(self, max_nodes: int) -> Batch:
        """Returns the next pass; every sequence in it holds pages for a tree of `max_nodes` nodes."""
        batch = Batch(evicted=self._make_room(max_nodes))
        self._admit(max_nodes)
        running = self.running
        batch.decode = [sequence for sequence in running if sequence.is_decoding]
        # Decoding has priority, but every pass makes some prefill progress, however many trees there are.
        budget = max(self.max_batch_tokens - len(batch.decode) * max_nodes, self.cache.page_size)
        for sequence in running:
            chunk = min(self._unread(sequence), budget)
            if self.cache.segment is not None and not sequence.is_decoding:
                # Whatever the others leave: up to the next multiple, or not in this pass.
                own = min(self._unread(sequence), self.cache.segment - sequence.cached % self.cache.segment)
                chunk = own if own <= budget or not batch.prefill else 0
            if not sequence.is_decoding and chunk > 0:
                batch.prefill.append((sequence, chunk))
                budget -= chunk
        return batch

    def _unread(self, sequence: GeneratedSequence) -> int:
        """Returns how many tokens one pass may read, up to the shared ones if recurrent states are kept there."""
        if self.cache.states is not None and sequence.cached < sequence.shared_len:
            return sequence.shared_len - sequence.cached
        return len(sequence.tokens) - sequence.cached

    def reserve(self, sequences: list[GeneratedSequence], max_nodes: int) -> bool:
        """Reserves pages for trees of `max_nodes` nodes if no eviction is needed; returns whether it did."""
        return all(self.cache.reserve(sequence.index, sequence.root + max_nodes) for sequence in sequences)

    def finish(self, sequence: GeneratedSequence) -> None:
        del self._running[sequence.index]
        self.cache.release(sequence.index)

    def _make_room(self, max_nodes: int) -> list[GeneratedSequence]:
        evicted = []
        for sequence in self.running:
            while sequence.index in self._running and not self.cache.reserve(sequence.index, sequence.root + max_nodes):
                evicted.append(self._evict_youngest())
        return evicted

    def _evict_youngest(self) -> GeneratedSequence:
        _, victim = self._running.popitem()
        self.cache.release(victim.index)
        victim.cached = 0
        victim.was_evicted = True
        insort(self.waiting, victim, key=lambda sequence: sequence.index)
        return victim

    def _admit(self, max_nodes: int) -> None:
        if not self.waiting:
            return
        # For each running prompt, an outcome that has read the shared tokens; None: none yet.
        donors: dict[int, GeneratedSequence | None] = {}
        for sequence in self._running.values():
            if donors.get(sequence.group) is None:
                donors[sequence.group] = sequence if sequence.cached >= sequence.shared_len > 0 else None
        admitted: list[GeneratedSequence] = []
        queue: list[GeneratedSequence] = []
        waiting = iter(self.waiting)
        for sequence in waiting:
            donor = donors.get(sequence.group)
            if len(self._running) + len(admitted) >= self.max_sequences:
                queue.append(sequence)
                break
            if sequence.shared_len and sequence.group in donors and donor is None:
                queue.append(sequence)  # another outcome is reading the shared tokens
                continue
            num_shared = self.cache.pages_for(sequence.shared_len) if donor else 0
            num_pages = self.cache.pages_for(sequence.root + max_nodes) - num_shared
            # One spare page per running sequence; else the new one would be evicted as soon as they grow.
            if num_pages + len(self._running) + len(admitted) > self.cache.free_pages:
                queue.append(sequence)
                break
            if donor is not None:
                self.cache.fork(donor.index, sequence.index, sequence.shared_len)
                sequence.cached = sequence.shared_len
            self.cache.reserve(sequence.index, sequence.root + max_nodes)
            admitted.append(sequence)
            donors.setdefault(sequence.group, None)
        self.waiting = [*queue, *waiting]
        if admitted:
            running = sorted([*self._running.values(), *admitted], key=lambda sequence: sequence.index)
            self._running = {sequence.index: sequence for sequence in running}
