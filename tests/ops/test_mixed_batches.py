"""Prefill chunks, draft trees, plain decode and idle slots in one call of tree_attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from attention_case import Target, check, random_tree
from simt_case import intercepted_launches, simt_library

from pagedtree import DraftTree, attention_plan, tree_attention

TREE = random_tree(np.random.default_rng(2), 60)
IDLE = (DraftTree([-1]), 0)  # no queries


@pytest.fixture
def mixed(target: Target) -> dict:
    """Decode rows, trees, 32 and 34 rows per head, a chunk of 300 queries, idle slots with keys, padding."""
    decode, limit = DraftTree([-1]), DraftTree.chain(15)
    kinds = [decode, IDLE, TREE, "causal", decode, limit, IDLE, (TREE, 20), decode, DraftTree.chain(16)]
    prefixes = [300, 40, 100, 90, 0, 515, 0, 64, 129, 70]
    case = target.case(prefixes, kinds, heads=(4, 2), causal_queries=300, padding=6, poison=float("nan")).build()
    case["page_table"][1] = -7  # left by a finished sequence
    return case


@contextmanager
def counted_launches() -> Iterator[list[tuple[int, int]]]:
    """Records simt's grid and block sizes."""
    launches: list[tuple[int, int]] = []

    def note(kernel, grid, block, *rest) -> int:
        launches.append((grid[0], block[0]))
        return 0

    library = simt_library()
    assert library is not None
    with intercepted_launches(library, note):
        yield launches


@pytest.mark.parametrize("max_seqlen_q", [None, 1, 300, 10**6])
def test_mixed(target: Target, mixed: dict, max_seqlen_q: int | None) -> None:
    """One or two lists give equal results within rounding."""
    check(dict(mixed, max_seqlen_q=max_seqlen_q))


def test_repeats_its_bits(target: Target, mixed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have the same bits with any plan and any order of threads and CTAs."""
    if target.backend == "cpu":
        pytest.skip("the cpu backend has one list")
    plan = attention_plan(mixed["seq_lens"], mixed["cu_seqlens_q"], num_q_heads=4, num_kv_heads=2, head_dim=64,
                          page_size=16, max_seqlen_q=300)  # fmt: skip
    expected = tree_attention(**mixed, max_seqlen_q=300, return_lse=True)
    for order in ("forward", "reverse", "random:5"):
        monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", order)
        result = tree_attention(**mixed, max_seqlen_q=300, plan=plan, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), order


def test_short_sequences_do_not_notice_the_long_one(target: Target) -> None:
    """A graph's replay with another long sequence repeats the short ones."""
    prefixes, kinds = [100, 30, 200], [DraftTree([-1]), DraftTree.chain(4), DraftTree.full([2])]
    alone = target.case([*prefixes, 0], [*kinds, IDLE], heads=(4, 2)).build()
    chunk = target.case([*prefixes, 64], [*kinds, "causal"], heads=(4, 2), causal_queries=200).build()
    rows = int(alone["cu_seqlens_q"][3])
    for name in ("k_cache", "v_cache", "q"):
        alone[name] = chunk[name]
    alone["page_table"] = chunk["page_table"]
    alone["tree_mask"] = torch.cat([alone["tree_mask"], torch.zeros_like(chunk["tree_mask"][rows:])])
    few = tree_attention(**alone, max_seqlen_q=200)
    many = tree_attention(**chunk, max_seqlen_q=200)
    torch.testing.assert_close(few[:rows], many[:rows], **target.tolerance)
    assert not few[rows:].any() and many[rows:].any()


def test_launches_follow_from_the_host_s_integers(target: Target, mixed: dict) -> None:
    """Launches ignore lengths, so graphs may be replayed with others."""
    if target.backend != "simt":
        pytest.skip("simt only")
    with counted_launches() as launches:
        tree_attention(**mixed, max_seqlen_q=300)
        first = launches.copy()
        large = 384 if target.variant == "wgmma" else 128
        assert [block for _, block in first[1:]] == [128, large]  # plan, small tiles, large tiles
        assert first[0][0] == 3
        launches.clear()
        lengths = torch.zeros_like(mixed["cu_seqlens_q"])
        tree_attention(**dict(mixed, cu_seqlens_q=lengths), max_seqlen_q=300)
        assert launches == first
        launches.clear()
        tree_attention(**mixed, max_seqlen_q=8)
        assert len(launches) == 2


def test_idle_slots_are_not_read(target: Target, mixed: dict) -> None:
    """Idle slots' lengths, masks and pages may be stale."""
    expected = tree_attention(**mixed, max_seqlen_q=300)
    stale = dict(mixed, seq_lens=mixed["seq_lens"].clone(), tree_lens=mixed["tree_lens"].clone())
    stale["seq_lens"][[1, 6]] = torch.tensor([2**31 - 1, 77], dtype=torch.int32)
    stale["tree_lens"][[1, 6]] = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    stale["page_table"] = mixed["page_table"].clone()
    stale["page_table"][[1, 6]] = 2**31 - 1
    torch.testing.assert_close(tree_attention(**stale, max_seqlen_q=300), expected, **target.tolerance)
