"""The pool behind `generate` assigns pages to sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from pagedtree.generation.paged_cache import PagedCache

CPU = torch.device("cpu")
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
