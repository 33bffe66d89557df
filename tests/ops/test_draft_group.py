"""DraftGroup sends some ranks' proposals to all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

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

    def __init__(self, with_probs: bool, go: threading.Event | None = None) -> None:
        self.with_probs, self.go, self.seen = with_probs, go, []

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Draft:
        if self.go is not None:
            assert self.go.wait(timeout=30)
        batch = lengths.shape[0]
        trees = TreeBatch.from_trees([DraftTree([-1, 0, 0, 1]) if b % 2 else DraftTree.chain(2) for b in range(batch)])
        rows = trees.parents.shape[0]
        drafts = torch.arange(rows) + int(tokens.sum())
        if not self.with_probs:
            return Draft(drafts, trees, None)
        probs = torch.arange(5 * VOCAB).view(5, VOCAB).float() / 100
        return Draft(drafts, trees, probs.bfloat16(), torch.arange(rows) % 5)

    def observe(self, result: str) -> None:
        self.seen.append(result)


def propose(group: dist.ProcessGroup, size: int, with_probs: bool) -> tuple:
    rank = dist.get_rank(group)
    shards = VocabShards([3, 0, 5, 2][rank], group=group)
    sizes = []

    def make(draft_ranks: dist.ProcessGroup | None) -> ToyDrafter:
        sizes.append(1 if draft_ranks is None else dist.get_world_size(draft_ranks))
        return ToyDrafter(with_probs)

    drafts = DraftGroup(make, size, shards=shards)
    tokens, lengths = torch.ones(3, 2, dtype=torch.int64), torch.tensor([2, 2, 2], dtype=torch.int32)
    draft = drafts.propose(tokens, lengths)
    drafts.observe("what became of it")
    expected = ToyDrafter(with_probs).propose(tokens, lengths)
    assert torch.equal(draft.draft_tokens, expected.draft_tokens)
    for name in ("parents", "cu_nodes", "first_child", "next_sibling", "mask", "valid"):
        assert torch.equal(getattr(draft.trees, name), getattr(expected.trees, name))
    assert (draft.trees.max_nodes, draft.trees.max_depth) == (4, 2)
    if with_probs:
        assert draft.draft_probs.dtype == torch.bfloat16
        assert torch.equal(draft.draft_probs, shards.own(expected.draft_probs))
        assert torch.equal(draft.draft_rows, expected.draft_rows)
    else:
        assert draft.draft_probs is None
    facts = (drafts.max_nodes, drafts.draft_law, drafts.needs_hidden, drafts.is_chain)
    assert drafts.stats.ms_per_token > 0
    return sizes, facts, drafts.stats.tokens, drafts.drafter.seen if drafts.drafter else None


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_get_the_proposal(ranks, size, with_probs):
    for rank, (sizes, facts, tokens, record) in enumerate(ranks.run(propose, 4, size, with_probs)):
        drafting = rank < size
        assert sizes == ([size] if drafting else [])
        assert facts == (4, "swor", False, False)
        assert tokens == 2 + 3 + 2
        assert record == (["what became of it"] if drafting else None)


def work_meanwhile(group: dist.ProcessGroup) -> int:
    """Drafting ends only after the target's work."""
    go = threading.Event()
    drafts = DraftGroup(lambda _: ToyDrafter(False, go), 1, shards=VocabShards(5, group=group))
    tokens, lengths = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([1], dtype=torch.int32)
    drafts.start(tokens, lengths)
    own_work = torch.ones(8).sum()
    go.set()
    return int(drafts.propose(tokens, lengths).draft_tokens[-1]) + int(own_work)


def test_drafting_overlaps_with_the_targets_work(ranks):
    assert ranks.run(work_meanwhile, 2) == [2 + 8, 2 + 8]


def with_probs_of(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[Draft], Any]:
    return lambda draft: draft._replace(draft_probs=torch.ones(shape, dtype=dtype))


# Changes of a proposal of 6 nodes in two trees.
MALFORMED: dict[str, tuple[Callable[[Draft], Any], str]] = {
    "an error": (lambda draft: DraftTree([0]), "parents[0] == -1"),
    "nothing": (lambda draft: None, "draft_probs or None, got NoneType"),
    "no trees": (lambda draft: (draft.draft_tokens, 3), r"a Tensor and a TreeBatch, got (Tensor, int)"),
    "too few tokens": (lambda draft: draft._replace(draft_tokens=draft.draft_tokens[:4]), "draft_tokens [4]"),
    "fractions": (lambda draft: draft._replace(draft_tokens=draft.draft_tokens / 2), "got torch.float32"),
    "another batch": (
        lambda draft: (torch.zeros(1, dtype=torch.int64), TreeBatch.from_trees([DraftTree.chain(0)])),
        "expected 2 trees",
    ),
    "offsets": (lambda draft: (draft[0], replace(draft.trees, cu_nodes=torch.tensor([0, -2, 6]).int())), "[0, -2, 6]"),
    "another vocabulary": (with_probs_of((6, VOCAB + 1), torch.float32), "got torch.float32 [6, 11]"),
    "doubles": (with_probs_of((6, VOCAB), torch.float64), "got torch.float64 [6, 10]"),
    "too few rows": (with_probs_of((5, VOCAB), torch.float32), "draft_probs of 6 nodes, or draft_rows, got [5, 10]"),
    "rows": (lambda draft: draft._replace(draft_rows=torch.zeros(2)), "draft_rows as integers [6], got torch.float32"),
}


class Malformed(ToyDrafter):
    def __init__(self, change: str, is_wrong: bool) -> None:
        super().__init__(False)
        self.change, self.is_wrong = change, is_wrong

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
        trees = TreeBatch.from_trees([DraftTree.chain(2)] * 2)
        draft = Draft(torch.arange(6), trees)
        return MALFORMED[self.change][0](draft) if self.is_wrong else draft


def malformed(group: dist.ProcessGroup, size: int, wrong_rank: int) -> list[Exception]:
    """Returns a rank's error for each malformed proposal; the group continues."""
    rank = dist.get_rank(group)
    shards = VocabShards([4, 6, 0][rank], group=group)
    errors: list[Any] = []
    arguments = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([1, 1], dtype=torch.int32)
    for change in MALFORMED:
        drafts = DraftGroup(lambda _, c=change: Malformed(c, rank == wrong_rank), size, shards=shards)
        try:
            drafts.propose(*arguments)
            errors.append(None)
        except Exception as error:
            errors.append(error)
        if drafts.drafter is not None:
            drafts.drafter.is_wrong = False
        assert drafts.propose(*arguments).draft_tokens.tolist() == list(range(6))
    return errors


@pytest.mark.parametrize(("size", "wrong_rank"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_a_malformed_proposal_is_not_sent_and_all_ranks_know_why(ranks, size, wrong_rank):
    for rank, errors in enumerate(ranks.run(malformed, 3, size, wrong_rank)):
        for error, (_, message) in zip(errors, MALFORMED.values(), strict=True):
            kind = (ValueError, TypeError) if rank == wrong_rank else GroupError
            assert isinstance(error, kind) and "expected" in str(error) and message in str(error)


class Choosy(ToyDrafter):
    def begin(self, page_size: int, sampling: str) -> None:
        if sampling == "greedy":
            raise ValueError("drafter: expected params")


def begun(group: dist.ProcessGroup) -> None:
    """A refusal ends with its call of `generate`."""
    drafts = DraftGroup(lambda _: Choosy(False), 1, shards=VocabShards(5, group=group))
    arguments = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([1], dtype=torch.int32)
    drafts.begin(16, "sampled")
    drafts.propose(*arguments)
    drafts.begin(16, "greedy")
    try:
        drafts.propose(*arguments)
    finally:
        drafts.begin(16, "sampled")
        drafts.propose(*arguments)


def test_drafter_refusal_reaches_all_ranks(ranks):
    first, *others = ranks.outcomes(begun, 3)
    assert isinstance(first, ValueError) and "drafter: expected params" in str(first)
    for other in others:
        assert isinstance(other, GroupError) and "drafter: expected params" in str(other)


UNMADE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "raises": (
        lambda: Path("/nowhere/weights").read_bytes(),
        FileNotFoundError,
        "No such file or directory: '/nowhere/weights'",
    ),
    "no drafter": (lambda: None, TypeError, "make: expected it to return a drafter, got NoneType"),
}


def unmade(group: dist.ProcessGroup, size: int, bad_ranks: list[int], how: str) -> Exception | None:
    """Returns a rank's error if `make` fails on some; the group continues."""
    rank = dist.get_rank(group)
    shards = VocabShards(5, group=group)

    def make(_: dist.ProcessGroup | None) -> Any:
        return UNMADE[how][0]() if rank in bad_ranks else ToyDrafter(False)

    outcome = None
    try:
        DraftGroup(make, size, shards=shards)
    except Exception as error:
        outcome = error
    drafts = DraftGroup(lambda _: ToyDrafter(False), size, shards=shards)
    arguments = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([1], dtype=torch.int32)
    assert drafts.propose(*arguments).draft_tokens.tolist() == [0, 1, 2]
    return outcome


@pytest.mark.parametrize("how", UNMADE)
@pytest.mark.parametrize(("size", "bad_ranks"), [(1, [0]), (3, [0]), (3, [2]), (3, [1, 2]), (3, [0, 1, 2])])
def test_a_drafter_that_is_not_made_is_known_to_all(ranks, size, bad_ranks, how):
    _, kind, message = UNMADE[how]
    for rank, error in enumerate(ranks.outcomes(unmade, 3, size, bad_ranks, how)):
        if rank in bad_ranks:
            assert isinstance(error, kind) and message in str(error)
        else:
            assert isinstance(error, GroupError)
            assert f"DraftGroup: make failed on rank {bad_ranks[0]} ({kind.__name__}: " in str(error)
            assert message in str(error)


def wrong_size(group: dist.ProcessGroup, sizes: list[int]) -> None:
    DraftGroup(lambda _: ToyDrafter(False), sizes[dist.get_rank(group)], shards=VocabShards(5, group=group))


def test_sizes_that_do_not_divide_or_differ(ranks):
    for error in ranks.outcomes(wrong_size, 3, [2, 2, 2]):
        assert isinstance(error, ValueError) and "a divisor of the target's 3 ranks, got 2" in str(error)
    for error in ranks.outcomes(wrong_size, 2, [1, 2]):
        assert isinstance(error, ValueError) and "size: expected the same" in str(error)
