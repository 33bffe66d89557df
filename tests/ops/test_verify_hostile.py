"""verify_greedy and verify_sampled on extreme, empty and malformed trees; what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from verify_case import BAD_ROW, MALFORMED, PARAMS, batch_of, check, check_bounds, streams

from pagedtree import (
    DraftTree,
    SamplingParams,
    TreeBatch,
    build_trees,
    verify_greedy,
    verify_sampled,
)


def test_thousand_nodes_deep_and_wide(device):
    count = 1024
    logits = torch.zeros(count, 5, device=device)
    logits[:, 2] = 5.0
    drafts = torch.full((count,), 2, device=device)
    chain = batch_of([list(range(-1, count - 1))], device)
    verdict = verify_greedy(logits, drafts, chain)
    check(verdict, 0, list(range(count)), [2] * count)
    drafts[:] = 1
    drafts[-1] = 2
    star = batch_of([[-1] + [0] * (count - 1)], device)
    check(verify_greedy(logits, drafts, star), 0, [0, count - 1], [2, 2])


def test_empty_batches_and_trees(device):
    empty = TreeBatch.from_trees([], device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    verdict = verify_sampled(torch.empty(0, 5, device=device), none, empty, PARAMS, seeds=none, positions=none)
    assert [tuple(t.shape) for t in verdict] == [(0, 1), (0,), (0, 1), (0,)]

    parents = torch.tensor([-1, 0], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 0, 2, 2], dtype=torch.int32, device=device)
    trees = build_trees(parents, offsets, max_nodes=2, max_depth=1)
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]], device=device)
    verdict = verify_greedy(logits, torch.tensor([0, 1], device=device), trees)
    for b in (0, 2):
        assert verdict.accept_index[b].tolist() == verdict.tokens[b].tolist() == [-1, -1]
        assert verdict.num_accepted[b] == 0 and verdict.status[b] == MALFORMED
    check(verdict, 1, [0, 1], [1, 0])


def test_malformed_trees_are_verified_where_reachable(device):
    parents = torch.tensor([-1, 0, 9, 1, -1], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 5], dtype=torch.int32, device=device)
    trees = build_trees(parents, offsets, max_nodes=5, max_depth=4)
    logits = torch.tensor([0.0, 1.0], device=device).expand(5, 2)
    verdict = verify_greedy(logits, torch.ones(5, dtype=torch.int32, device=device), trees)
    check(verdict, 0, [0, 1, 3], [1, 1, 1], status=MALFORMED)


@given(st.integers(0, 2**32))
def test_hostile_links_stay_inside(device, seed):
    """Garbage in offsets, links, drafts and flags: the walk ends, and what comes out is in range."""
    generator = torch.Generator().manual_seed(seed)
    rows, batch, vocab, max_nodes, max_depth = 12, 4, 3, 8, 5
    mixed = [-(2**31), -5, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 2**31 - 1]

    def garbage(size: int) -> Tensor:
        picks = torch.randint(0, len(mixed), (size,), generator=generator)
        return torch.tensor(mixed, dtype=torch.int64)[picks].int().to(device)

    trees = TreeBatch(
        cu_nodes=garbage(batch + 1), parents=garbage(rows), depths=garbage(rows), first_child=garbage(rows),
        next_sibling=garbage(rows), mask=garbage(rows)[:, None],
        valid=torch.ones(batch, dtype=torch.bool, device=device), max_nodes=max_nodes, max_depth=max_depth,
    )  # fmt: skip
    logits = torch.zeros(rows, vocab, device=device)
    for verdict in (
        verify_greedy(logits, garbage(rows), trees),
        verify_greedy(logits, torch.zeros(rows, dtype=torch.int32, device=device), trees),
        verify_sampled(logits, garbage(rows), trees, PARAMS, **streams(batch, device)),
        verify_greedy(logits, garbage(rows), trees, draft_to_target=garbage(3)),
    ):
        check_bounds(verdict, max_nodes, max_depth, vocab)


@pytest.mark.parametrize("link", [0, 1, 3, -1, 100, 2**31 - 1])
def test_links_that_loop(device, link):
    trees = batch_of([[-1, 0, 0]], device, max_depth=6)
    logits = torch.tensor([0.0, 1.0], device=device).expand(3, 2)
    sibling = trees.next_sibling.clone()
    sibling[1] = link
    drafts = torch.tensor([0, 0, 0], device=device)
    verdict = verify_greedy(logits, drafts, replace(trees, next_sibling=sibling))
    check(verdict, 0, [0], [1], status=0 if link == -1 else MALFORMED)
    child = trees.first_child.clone()
    child[0] = link
    drafts = torch.tensor([1, 1, 1], device=device)
    verdict = verify_greedy(logits, drafts, replace(trees, first_child=child))
    path = [0, 1] if link == 1 else [0]
    check(verdict, 0, path, [1] * len(path), status=0 if link in (1, -1) else MALFORMED)


def test_refusals(device):
    trees = batch_of([[-1, 0], [-1]], device)
    good = {
        "logits": torch.zeros(3, 40, device=device),
        "draft_tokens": torch.zeros(3, dtype=torch.int64, device=device),
        "trees": trees,
        "params": SamplingParams(),
        **streams(2, device),
    }
    verify_sampled(**good)
    valid, links = trees.valid, trees.first_child
    wrong = [
        ("logits", good["logits"].int(), ValueError, "`logits` .* dtype torch.float32 or .*bfloat16, got torch.int32"),
        ("logits", [1.0], TypeError, "logits"),
        ("draft_tokens", good["draft_tokens"][:2], ValueError, r"`draft_tokens` must be of shape \[3\] .*, got \[2\]"),
        ("draft_tokens", good["draft_tokens"].float(), ValueError, "`draft_tokens` .* dtype torch.int32 or .*int64"),
        ("trees", DraftTree([-1, 0]), TypeError, "trees: expected a TreeBatch, got DraftTree"),
        ("trees", replace(trees, valid=valid[:1]), ValueError, r"`valid` must be of shape \[2\] .*, got \[1\]"),
        ("trees", replace(trees, first_child=links.long()), ValueError, "`first_child` must be of dtype torch.int32"),
        ("trees", replace(trees, next_sibling=links[:2]), ValueError, r"`next_sibling` must be of shape \[3\]"),
        ("trees", replace(trees, max_depth=-1), ValueError, r"`max_depth` must be in 0..1023, got -1"),
        ("trees", replace(trees, max_nodes=1025), ValueError, r"`max_nodes` must be in 1..1024, got 1025"),
        ("params", {}, TypeError, "params: expected a SamplingParams, got dict"),
        ("params", SamplingParams(min_p=torch.zeros(3, device=device)), ValueError,
         r"`min_p` must be of shape \[1\] or \[2\], got \[3\]"),
        ("seeds", good["seeds"].int(), ValueError, "`seeds` must be of dtype torch.int64, got torch.int32"),
        ("positions", good["positions"][:1], ValueError, r"`positions` must be of shape \[2\] .*, got \[1\]"),
        ("grammar_mask", torch.ones(3, 39, dtype=torch.bool, device=device), ValueError,
         r"`grammar_mask` must be of shape \[3, 40\] .*, got \[3, 39\]"),
        ("grammar_mask", torch.ones(3, 1, dtype=torch.int32, device=device), ValueError,
         r"`grammar_mask` must be of shape \[3, 2\] .*, got \[3, 1\]"),
        ("grammar_mask", torch.ones(3, 40, device=device), ValueError, "`grammar_mask` .* dtype torch.bool or .*int32"),
        ("draft_to_target", torch.ones(4, device=device), ValueError, "`draft_to_target` .* torch.int32 or .*int64"),
    ]  # fmt: skip
    for name, value, error, message in wrong:
        with pytest.raises(error, match=message):
            verify_sampled(**{**good, name: value})
    with pytest.raises(ValueError, match="verify_greedy: `draft_tokens` must be of shape"):
        verify_greedy(good["logits"], good["draft_tokens"][:1], trees)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 3], r"`cu_nodes\[0\]` must be 0, got 1"),
        ([0, 2, 1], r"`cu_nodes` must be non-descending"),
        ([0, 2, 4], r"`cu_nodes` must be at most 3 rows, got 4"),
    ],
)
def test_value_checks(device, value_checks, offsets, message):
    trees = batch_of([[-1, 0], [-1]], device)
    logits, drafts = torch.zeros(3, 5, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    assert verify_greedy(logits.log(), drafts, trees).status.tolist() == [BAD_ROW] * 2, "a status, not an error"
    bad = replace(trees, cu_nodes=torch.tensor(offsets, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=message):
        verify_greedy(logits, drafts, bad)
