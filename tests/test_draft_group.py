"""DraftGroup: some ranks draft, all get the proposals."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from pagedtree import Draft, DraftTree, TreeBatch
from pagedtree.distributed import DraftGroup, GroupError, VocabShards

VOCAB = 10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(tmp_path_factory.mktemp("draft_ranks"))
    yield processes
    processes.close()


class ToyDrafter:
    """Drafts trees of two shapes; waits for `go` if it has one."""

    max_nodes, draft_law = 4, "swor"

    def __init__(self, with_laws: bool, go: threading.Event | None = None) -> None:
        self.with_laws, self.go, self.seen = with_laws, go, []

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Draft:
        if self.go is not None:
            assert self.go.wait(timeout=30)
        if int(lengths[0]) < 0:
            raise ValueError("lengths: expected >= 0")
        batch = lengths.shape[0]
        trees = TreeBatch.from_trees([DraftTree([-1, 0, 0, 1]) if b % 2 else DraftTree.chain(2) for b in range(batch)])
        rows = trees.parents.shape[0]
        drafts = torch.arange(rows) + int(tokens.sum())
        if not self.with_laws:
            return Draft(drafts, trees, None)
        laws = torch.arange(5 * VOCAB).view(5, VOCAB).float() / 100
        return Draft(drafts, trees, laws.bfloat16(), torch.arange(rows) % 5)

    def observe(self, result: str) -> None:
        self.seen.append(result)


def propose(group: dist.ProcessGroup, size: int, with_laws: bool) -> tuple:
    rank = dist.get_rank(group)
    shards = VocabShards([3, 0, 5, 2][rank], group=group)
    made = []

    def make(draft_ranks: dist.ProcessGroup | None) -> ToyDrafter:
        made.append(1 if draft_ranks is None else dist.get_world_size(draft_ranks))
        return ToyDrafter(with_laws)

    drafts = DraftGroup(make, size, shards=shards)
    tokens, lengths = torch.ones(3, 2, dtype=torch.int64), torch.tensor([2, 2, 2], dtype=torch.int32)
    draft = drafts.propose(tokens, lengths)
    drafts.observe("what became of it")
    expected = ToyDrafter(with_laws).propose(tokens, lengths)
    assert torch.equal(draft.draft_tokens, expected.draft_tokens)
    for name in ("parents", "cu_nodes", "first_child", "next_sibling", "mask", "valid"):
        assert torch.equal(getattr(draft.trees, name), getattr(expected.trees, name))
    assert (draft.trees.max_nodes, draft.trees.max_depth) == (4, 2)
    if with_laws:
        assert draft.draft_probs.dtype == torch.bfloat16
        assert torch.equal(draft.draft_probs, shards.own(expected.draft_probs))
        assert torch.equal(draft.draft_rows, expected.draft_rows)
    else:
        assert draft.draft_probs is None
    facts = (drafts.max_nodes, drafts.draft_law, drafts.needs_hidden, drafts.is_chain)
    assert drafts.stats.ms_per_token > 0
    return made, facts, drafts.stats.tokens, drafts.drafter.seen if drafts.drafter else None


@pytest.mark.parametrize("with_laws", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_get_the_proposal(ranks, size, with_laws):
    for rank, (made, facts, tokens, seen) in enumerate(ranks.run(propose, 4, size, with_laws)):
        drafting = rank < size
        assert made == ([size] if drafting else [])
        assert facts == (4, "swor", False, False)
        assert tokens == 2 + 3 + 2
        assert seen == (["what became of it"] if drafting else None)


def work_meanwhile(group: dist.ProcessGroup) -> int:
    """Drafting ends only after the target has done something of its own."""
    go = threading.Event()
    drafts = DraftGroup(lambda _: ToyDrafter(False, go), 1, shards=VocabShards(5, group=group))
    tokens, lengths = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([1], dtype=torch.int32)
    drafts.start(tokens, lengths)
    own_work = torch.ones(8).sum()
    go.set()
    return int(drafts.propose(tokens, lengths).draft_tokens[-1]) + int(own_work)


def test_drafting_overlaps_with_the_targets_work(ranks):
    assert ranks.run(work_meanwhile, 2) == [2 + 8, 2 + 8]


def fail(group: dist.ProcessGroup) -> None:
    drafts = DraftGroup(lambda _: ToyDrafter(False), 1, shards=VocabShards(5, group=group))
    drafts.propose(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([-1], dtype=torch.int32))


def test_a_failure_to_draft_is_known_to_all(ranks):
    first, *others = ranks.outcomes(fail, 3)
    assert isinstance(first, ValueError) and "expected >= 0" in str(first)
    for other in others:
        assert isinstance(other, GroupError) and "ValueError: lengths: expected >= 0" in str(other)


class Choosy(ToyDrafter):
    def prepare(self, sequences: list[str]) -> None:
        self.seen.append(sequences)
        if "too long" in sequences:
            raise ValueError("drafter: expected short texts")


def prepared(group: dist.ProcessGroup, sequences: list[str]) -> list | None:
    """Two proposals after `prepare`."""
    drafts = DraftGroup(lambda _: Choosy(False), 1, shards=VocabShards(5, group=group))
    drafts.prepare(sequences)
    for _ in range(2):
        drafts.propose(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([1], dtype=torch.int32))
    return drafts.drafter.seen if drafts.drafter else None


def test_the_drafter_is_prepared_once_and_its_refusal_is_known_to_all(ranks):
    assert ranks.run(prepared, 2, ["text"]) == [[["text"]], None]
    first, other = ranks.outcomes(prepared, 2, ["too long"])
    assert isinstance(first, ValueError) and "expected short texts" in str(first)
    assert isinstance(other, GroupError) and "drafter: expected short texts" in str(other)


def wrong_size(group: dist.ProcessGroup, sizes: list[int]) -> None:
    DraftGroup(lambda _: ToyDrafter(False), sizes[dist.get_rank(group)], shards=VocabShards(5, group=group))


def test_sizes_that_do_not_divide_or_differ(ranks):
    for error in ranks.outcomes(wrong_size, 3, [2, 2, 2]):
        assert isinstance(error, ValueError) and "a divisor of the target's 3 ranks, got 2" in str(error)
    for error in ranks.outcomes(wrong_size, 2, [1, 2]):
        assert isinstance(error, ValueError) and "`size` must be the same" in str(error)
