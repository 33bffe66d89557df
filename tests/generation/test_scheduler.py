"""The scheduler admits and evicts as plain loops do, in linear time; the pool assigns pages as a plain model does."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedtree.generation import scheduler as scheduler_module
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.scheduler import GeneratedSequence, Scheduler

CPU = torch.device("cpu")


class Loops:
    def __init__(self, sequences, cache, max_sequences):
        self.cache, self.max_sequences = cache, max_sequences
        self.waiting, self.running = list(sequences), []

    def make_room(self, max_nodes):
        evicted = []
        for sequence in sorted(self.running, key=lambda other: other.index):
            while sequence in self.running and not self.cache.reserve(sequence.index, sequence.root + max_nodes):
                victim = max(self.running, key=lambda other: other.index)
                self.running.remove(victim)
                self.cache.release(victim.index)
                victim.cached = 0
                self.waiting.append(victim)
                evicted.append(victim.index)
        return evicted

    def admit(self, max_nodes):
        for sequence in sorted(self.waiting, key=lambda other: other.index):
            siblings = sorted((s for s in self.running if s.group == sequence.group), key=lambda other: other.index)
            donor = next((other for other in siblings if other.cached >= sequence.shared_len > 0), None)
            if len(self.running) >= self.max_sequences:
                return
            if sequence.shared_len and siblings and donor is None:
                continue
            shared = self.cache.pages_for(sequence.shared_len) if donor else 0
            if self.cache.pages_for(sequence.root + max_nodes) - shared + len(self.running) > self.cache.free_pages:
                return
            if donor is not None:
                self.cache.fork(donor.index, sequence.index, sequence.shared_len)
                sequence.cached = sequence.shared_len
            self.cache.reserve(sequence.index, sequence.root + max_nodes)
            self.waiting.remove(sequence)
            self.running.append(sequence)


def sequences_of(prompts, n, page_size, new=12):
    shared = [(size - 1) // page_size * page_size if n > 1 else 0 for size in prompts]
    return [
        GeneratedSequence(b * n + j, b, [0] * size, size + new, shared_len=shared[b])
        for b, size in enumerate(prompts)
        for j in range(n)
    ]


@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    n=st.integers(1, 4),
    page_size=st.sampled_from([1, 4]),
    spare=st.integers(0, 12),
    max_sequences=st.integers(1, 9),
    new_tokens=st.lists(st.integers(1, 3), min_size=1, max_size=40),
)
def test_passes_are_those_of_plain_loops(prompts, n, page_size, spare, max_sequences, new_tokens):
    max_nodes = 4
    num_pages = -(-(max(prompts) + 12 + max_nodes) // page_size) + spare
    caches = [PagedCache(num_pages, page_size, CPU) for _ in range(2)]
    texts = [sequences_of(prompts, n, page_size) for _ in range(2)]
    scheduler = Scheduler(texts[0], caches[0], max_batch_tokens=16, max_sequences=max_sequences)
    loops = Loops(texts[1], caches[1], max_sequences)
    for step in range(400):
        if scheduler.is_done:
            break
        evicted = loops.make_room(max_nodes)
        loops.admit(max_nodes)
        batch = scheduler.schedule(max_nodes)
        assert [s.index for s in batch.evicted] == evicted
        assert [s.index for s in scheduler.running] == sorted(s.index for s in loops.running)
        assert [s.index for s in scheduler.waiting] == sorted(s.index for s in loops.waiting)
        assert [caches[0].pages(i) for i in range(len(texts[0]))] == [caches[1].pages(i) for i in range(len(texts[0]))]
        growth = [(sequence, new_tokens[step % len(new_tokens)]) for sequence in batch.decode]
        for sequence, count in batch.prefill:
            sequence.cached += count
            texts[1][sequence.index].cached += count
            if sequence.cached == len(sequence.tokens):
                growth.append((sequence, 1))
        for sequence, count in growth:
            other = texts[1][sequence.index]
            for state in (sequence, other):
                state.tokens += [0] * count
                state.cached = state.root
            if len(sequence.tokens) >= sequence.max_length:
                scheduler.finish(sequence)
                loops.running.remove(other)
                caches[1].release(other.index)
    assert scheduler.is_done and not loops.running and not loops.waiting


@pytest.mark.parametrize("n", [1, 8])
def test_work_is_linear_in_the_number_of_sequences(n):
    """Executed lines count admissions, evictions and ends."""

    def lines_of(count):
        cache = PagedCache(count * 4, 4, CPU)
        sequences = sequences_of([9] * (count // n), n, 4)
        scheduler, lines = Scheduler(sequences, cache, max_batch_tokens=10**6), 0

        def trace(frame, event, _):
            nonlocal lines
            lines += event == "line"
            return trace if frame.f_code.co_filename == scheduler_module.__file__ else None

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(6):
                batch = scheduler.schedule(4)
                for sequence, rows in batch.prefill:
                    sequence.cached += rows
                for sequence in batch.decode:
                    sequence.cached += 1
                    sequence.tokens.append(0)
                for sequence in batch.decode[::9]:
                    scheduler.finish(sequence)
        finally:
            sys.settrace(previous)
        return lines

    assert lines_of(1600) < 2.2 * lines_of(800)
    assert GeneratedSequence.__eq__ is object.__eq__


# ---- the pool of pages

NAMES = st.sampled_from(["reserve", "trim", "release", "fork", "grow"])
ACTIONS = st.tuples(NAMES, st.integers(0, 3), st.integers(0, 3), st.integers(0, 40))


@given(page_size=st.sampled_from([1, 3, 16]), actions=st.lists(ACTIONS, max_size=40))
def test_pages_are_held_as_a_plain_model_says(page_size, actions):
    cache = PagedCache(6, page_size, CPU)
    tables: dict[int, list[int]] = {}
    for action, a, b, tokens in actions:
        pages = -(-tokens // page_size)
        before = list(tables.get(a, []))
        occupied = {page for table in tables.values() for page in table}
        assert cache.free_pages == cache.num_pages - len(occupied)
        if action == "reserve":
            fits = pages - len(before) <= cache.free_pages
            assert cache.reserve(a, tokens) == fits
            new = cache.pages(a)[len(before) :]
            assert cache.pages(a)[: len(before)] == before
            assert len(new) == (max(pages - len(before), 0) if fits else 0) and not occupied & set(new)
            tables[a] = list(cache.pages(a))
        elif action == "trim":
            cache.trim(a, tokens)
            tables[a] = before[:pages]
        elif action == "release":
            cache.release(a)
            tables.pop(a, None)
        elif action == "fork" and a in tables and not tables.get(b) and a != b:
            cache.fork(a, b, pages * page_size)
            tables[b] = before[:pages]
        elif action == "grow" and cache.num_pages < 12:
            cache.grow(2)
        for sequence in range(4):
            assert cache.pages(sequence) == tables.get(sequence, [])
    assert cache.peak_pages >= cache.pages_in_use
    for sequence in range(4):
        cache.release(sequence)
    assert cache.free_pages == cache.num_pages
    assert cache.reserve(9, cache.num_pages * page_size)
    assert sorted(cache.pages(9)) == list(range(cache.num_pages))


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_pages, page_size: expected at least 1, got 0 and 4"):
        PagedCache(0, 4, CPU)
    cache = PagedCache(4, 4, CPU)
    cache.reserve(0, 8)
    with pytest.raises(ValueError, match=r"fork: num_tokens: expected whole pages, .* got 6"):
        cache.fork(0, 1, 6)


def test_a_cache_that_does_not_fit_names_its_sizes():
    cache = PagedCache(1, 2**40, CPU)
    with pytest.raises(torch.OutOfMemoryError, match=r"num_pages, page_size: .* got 1 pages of 1099511627776 tokens"):
        cache.layer(0, torch.zeros(1, 2, 64), None)
