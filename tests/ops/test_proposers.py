"""N-gram tries and Medusa trees against plain loops."""

from __future__ import annotations

import pytest
import torch
from draft_checks import packed_trees
from step_case import int32

from pagedtree import Draft, DraftTree, TreeBatch, medusa_propose, ngram_propose, rejected_predictions
from pagedtree._ops import ops
from pagedtree.reference.drafting import ngram_tree
from pagedtree.testing import decoy_propose

pytestmark = pytest.mark.usefixtures("on_device")

# ngram_propose --------------------------------------------------------------------------------------------------------


def propose(history: list[int], **kwargs: object) -> tuple[list[int], list[int]]:
    extra = kwargs.pop("extra", None)
    draft = ngram_propose(
        torch.tensor([history], dtype=torch.int64).reshape(1, -1),
        int32([len(history)]),
        extra=None if extra is None else torch.tensor([extra], dtype=torch.int64).reshape(1, -1),
        **kwargs,  # type: ignore[arg-type]
    )
    assert draft.trees.valid.all() == (len(history) > 0)
    return packed_trees(draft)[0]


@pytest.mark.parametrize(
    ("history", "options", "tokens", "parents"),
    [
        ([], {}, [], []),
        ([5], {}, [5], [-1]),
        ([5, 5], {}, [5, 5], [-1, 0]),
        ([1, 2, 3], {}, [3], [-1]),
        ([1, 2, 3, 1], {}, [1, 2, 3, 1], [-1, 0, 1, 2]),
        # The longer match comes first, though older; what they share is one path.
        ([1, 2, 7, 8, 2, 7, 9, 1, 2], {"max_depth": 2}, [2, 7, 8, 9], [-1, 0, 1, 1]),
        ([1, 2, 7, 8, 2, 7, 9, 1, 2], {"max_depth": 2, "min_ngram": 2}, [2, 7, 8], [-1, 0, 1]),
        # The most recent first.
        ([1, 2, 1, 3, 1, 4, 1], {"max_depth": 1}, [1, 4, 3, 2], [-1, 0, 0, 0]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_depth": 1, "max_branches": 2}, [1, 4, 3], [-1, 0, 0]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_nodes": 2}, [1, 4], [-1, 0]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_nodes": 1}, [1], [-1]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_depth": 0}, [1], [-1]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_branches": 0}, [1], [-1]),
        # Repetition: each older match lengthens the one path, which is no new branch.
        ([6] * 9, {"max_branches": 1, "max_depth": 5}, [6] * 6, [-1, 0, 1, 2, 3, 4]),
        # Negative tokens separate.
        ([1, 2, -1, 3, 1, 2], {"min_ngram": 1}, [2], [-1]),
        ([4, 1, 2, 3, -1, 9, 1, 2], {"min_ngram": 2}, [2, 3], [-1, 0]),
        ([3, -1, -1], {}, [-1], [-1]),
        ([2, 1], {"extra": [1, 7, -1, 2, 1, 8, 9, -1, 1]}, [1, 8, 9, 7], [-1, 0, 1, 0]),
        ([2, 1], {"extra": []}, [1], [-1]),
    ],
)
def test_ngram_cases(
    backend: str, history: list[int], options: dict[str, object], tokens: list[int], parents: list[int]
) -> None:
    options = {"max_nodes": 16, "max_depth": 4} | options
    assert ngram_tree(history, **options) == (tokens, parents)  # type: ignore[arg-type]
    assert propose(history, **options) == (tokens, parents)


def test_ngram_garbage_lengths_and_finished(backend: str) -> None:
    history = torch.tensor([[1, 2, 1]] * 5)
    draft = ngram_propose(
        history,
        int32([-7, 2**31 - 1, 3, 0, 1]),
        max_nodes=4,
        max_depth=3,
        active=torch.tensor([True, True, False, True, True]),
    )
    assert packed_trees(draft) == [([], []), ([1, 2, 1], [-1, 0, 1]), ([], []), ([], []), ([1], [-1])]


def rejected_reference(
    draft: Draft, predictions: list[int], accepted: list[list[int]], context: int
) -> list[list[int]]:
    streams = []
    for b, (tokens, parents) in enumerate(packed_trees(draft)):
        begin = int(draft.trees.cu_nodes[b])
        stream: list[int] = []
        for node in reversed(range(draft.trees.max_nodes)):
            run: list[int] = []
            if 0 < node < len(tokens) and node not in accepted[b]:
                path, up = [], node
                while up >= 0:
                    path.insert(0, tokens[up])
                    up = parents[up]
                run = [*path[-context:], predictions[begin + node]]
            stream += [-1] * (context + 1 - len(run)) + run + [-1]
        streams.append(stream)
    return streams


@pytest.mark.parametrize("context", [1, 3, 9])
def test_rejected_predictions(device: torch.device, context: int) -> None:
    trees = TreeBatch.from_trees(
        [DraftTree.full([3, 2, 1]), DraftTree.chain(0), DraftTree.chain(4)],
        max_nodes=20,
        max_depth=5,
        capacity=30,
        device=device,
    )
    tokens = torch.arange(200, 230)
    tokens[21:] = -1
    draft = Draft(torch.where(trees.depths >= 0, tokens, -1), trees)
    predictions = torch.arange(500, 530)
    accepted = [[0, 2, 7, -1, -1, -1], [0, -1, -1, -1, -1, -1], [0, 1, 2, 3, 4, -1]]
    extra = rejected_predictions(trees, draft.draft_tokens, predictions, int32(accepted), context=context)
    assert extra.shape == (3, 20 * (context + 2)) and extra.dtype == torch.int64
    assert extra.tolist() == rejected_reference(draft, predictions.tolist(), accepted, context)
    # The target's word at a rejected node is found again once the text reaches the same tokens.
    node = 4
    history = torch.tensor([[int(tokens[1]), int(tokens[node])]])
    found = ngram_propose(history, int32([2]), max_nodes=3, max_depth=2, extra=extra[:1], min_ngram=min(context, 2))
    assert int(predictions[node]) in packed_trees(found)[0][0]


def test_rejected_predictions_without_rows(device: torch.device) -> None:
    trees = TreeBatch.from_trees([], max_nodes=4, device=device)
    none = torch.empty(0, dtype=torch.int64)
    assert rejected_predictions(trees, none, none, torch.empty(0, 1, dtype=torch.int32)).shape == (0, 24)


# medusa_propose -------------------------------------------------------------------------------------------------------


def test_medusa_edges(backend: str) -> None:
    root_only = medusa_propose(torch.randn(2, 3, 8), DraftTree.chain(0), root_tokens=torch.tensor([4, 5]))
    assert packed_trees(root_only) == [([4], [-1]), ([5], [-1])]
    whole = medusa_propose(torch.arange(6.0).reshape(1, 1, 6), DraftTree.full([6]))
    assert packed_trees(whole)[0][0] == [-1, 5, 4, 3, 2, 1, 0]
    empty = medusa_propose(torch.randn(0, 3, 8), DraftTree.full([2, 2]))
    assert empty.draft_tokens.shape == (0,) and empty.trees.cu_nodes.tolist() == [0]


def test_medusa_ranks_with_gaps(backend: str) -> None:
    """A node takes the rank that its path names, however many siblings it has."""
    tree = DraftTree.from_paths([[0], [4], [4, 2]])
    draft = medusa_propose(torch.arange(18.0).reshape(1, 2, 9), tree)
    assert packed_trees(draft)[0] == ([-1, 8, 4, 6], [-1, 0, 0, 2])
    with pytest.raises(ValueError, match=r"`tree` must have child ranks below 4 \(V\), got 4"):
        medusa_propose(torch.randn(1, 2, 4), tree)


def test_medusa_bad_tree_values(backend: str) -> None:
    tokens, _, _ = ops.medusa_propose(
        torch.randn(1, 2, 8), int32([-1, 0, 0, 0]), int32([0, 9, 1, -4]), int32([-1, 0, 7, 0]), num_top=2
    )
    assert tokens.tolist() == [-1, -1, -1, -1]


# decoy_propose --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_nodes", [7, 9, 10, 40])
def test_decoys(device: torch.device, max_nodes: int) -> None:
    """The right tokens are the last children of each other, none at the row of its depth; -1 past a text's end."""
    texts = torch.tensor([[4, 0, 7, 2, 9], [5, 1, -1, -1, -1], [8, 8, 8, 8, 8]])
    active, depth, width = torch.tensor([True, False, True]), 3, (max_nodes - 1) // 3
    for lengths, expected in (([2, 2, 1], ([7, 2, 9], [8, 8, 8])), ([4, 1, 5], ([9, -1, -1], [-1, -1, -1]))):
        draft = decoy_propose(texts, int32(lengths), max_nodes=max_nodes, max_depth=depth, active=active)
        first, idle, last = packed_trees(draft)
        assert idle == ([], []) and draft.trees.valid.tolist() == [True, False, True]
        for tree, right, row, length in ((first, expected[0], 0, lengths[0]), (last, expected[1], 2, lengths[2])):
            tokens, parents = tree
            assert tokens[0] == texts[row, length - 1] and tokens[width::width] == right
            assert parents == [-1, *(width * level for level in range(depth) for _ in range(width))]
            for level, token in enumerate(right):
                decoys = tokens[1 + width * level : width * (level + 1)]
                assert all(decoy >= 0 for decoy in decoys) == (token >= 0)
                assert len({token, *decoys}) == (width if token >= 0 else 1)
    roots = decoy_propose(texts, int32([2, 2, 1]), max_nodes=7, max_depth=3, root_tokens=torch.tensor([3, 6, 5]))
    assert [tokens[0] for tokens, _ in packed_trees(roots)] == [3, 6, 5]
    assert decoy_propose(texts[:0], int32([]), max_nodes=7, max_depth=3).draft_tokens.shape == (0,)


# Refusals, schemas ----------------------------------------------------------------------------------------------------


def test_refusals(device: torch.device) -> None:
    history, lens = torch.zeros(2, 5, dtype=torch.int64), int32([5, 5])
    for match, options in [
        (r"ngram_propose: `max_nodes` must be in 1\.\.1024, got 0", {"max_nodes": 0}),
        (r"`max_depth` must be in 0\.\.1023, got 1024", {"max_depth": 1024}),
        (r"`min_ngram` must be at least 1, got 0", {"min_ngram": 0}),
        (r"`max_ngram` must be in min_ngram\.\.64, got 1", {"min_ngram": 2, "max_ngram": 1}),
        (r"`max_branches` must be at least 0, got -1", {"max_branches": -1}),
        (r"`extra` must be of shape \[2, \*\] .*, got \[3, 4\]", {"extra": torch.zeros(3, 4, dtype=torch.int64)}),
    ]:
        with pytest.raises(ValueError, match=match):
            ngram_propose(history, lens, **({"max_nodes": 4, "max_depth": 4} | options))
    with pytest.raises(ValueError, match=r"`history_lens` must be of dtype torch.int32, got torch.int64"):
        ngram_propose(history, lens.long(), max_nodes=4, max_depth=4)
    with pytest.raises(ValueError, match=r"medusa_propose: `tree` must have depth <= 2 \(the heads\), got 3"):
        medusa_propose(torch.randn(1, 2, 8), DraftTree.chain(3))
    with pytest.raises(ValueError, match=r"medusa_propose: `tree` must have child ranks below 8 \(V\), got 8"):
        medusa_propose(torch.randn(1, 2, 8), DraftTree.full([9]))
    with pytest.raises(ValueError, match=r"medusa_propose: `head_logits` must be of shape \[\*, \*, \*\]"):
        medusa_propose(torch.randn(1, 8), DraftTree.full([2]))
    trees = TreeBatch.from_trees([DraftTree.chain(1)], device=device)
    tokens = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rejected_predictions: `predictions` must be of shape \[2\]"):
        rejected_predictions(trees, tokens, tokens[:1], int32([[0]]))
    with pytest.raises(ValueError, match=r"rejected_predictions: `accept_index` must be of shape \[1, S\]"):
        rejected_predictions(trees, tokens, tokens, int32([[0], [0]]))
    with pytest.raises(ValueError, match=r"rejected_predictions: `context` must be in 1..1023"):
        rejected_predictions(trees, tokens, tokens, int32([[0]]), context=0)
    for match, options in [
        ("max_nodes: expected 9 to 1024, got 8", {"max_nodes": 8}),
        ("max_depth: expected at least 1, got 0", {"max_depth": 0}),
        (r"lengths: expected shape \[2\], got \[1\]", {"lengths": lens[:1]}),
        ("active: expected torch.bool, got torch.int32", {"active": lens}),
    ]:
        with pytest.raises(ValueError, match=match):
            decoy_propose(**({"texts": history, "lengths": lens, "max_nodes": 9, "max_depth": 4} | options))
    with pytest.raises(TypeError):
        ngram_propose(history, lens, max_nodes="4", max_depth=4)  # type: ignore[arg-type]


def test_value_checks(value_checks: None) -> None:
    with pytest.raises(ValueError, match=r"ngram_propose: `history_lens\[1\]` must be in 0\.\.5, got 6"):
        ngram_propose(torch.zeros(2, 5, dtype=torch.int64), int32([5, 6]), max_nodes=4, max_depth=4)
