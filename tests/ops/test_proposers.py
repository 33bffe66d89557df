"""N-gram tries, Medusa trees and decoys equal plain loops."""

from __future__ import annotations

import calls
import pytest
import torch
from support import int32
from support.batches import packed_trees

from pagedtree import Draft, DraftTree, TreeBatch, medusa_propose, ngram_propose
from pagedtree.drafting import rejected_predictions
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
        # The longer, older match leads; shared prefixes are one path.
        ([1, 2, 7, 8, 2, 7, 9, 1, 2], {"max_depth": 2}, [2, 7, 8, 9], [-1, 0, 1, 1]),
        ([1, 2, 7, 8, 2, 7, 9, 1, 2], {"max_depth": 2, "min_ngram": 2}, [2, 7, 8], [-1, 0, 1]),
        # The most recent first.
        ([1, 2, 1, 3, 1, 4, 1], {"max_depth": 1}, [1, 4, 3, 2], [-1, 0, 0, 0]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_depth": 1, "max_branches": 2}, [1, 4, 3], [-1, 0, 0]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_nodes": 2}, [1, 4], [-1, 0]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_nodes": 1}, [1], [-1]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_depth": 0}, [1], [-1]),
        ([1, 2, 1, 3, 1, 4, 1], {"max_branches": 0}, [1], [-1]),
        # Older matches lengthen one path, adding no branch.
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
    # The target's token at a rejected node is proposed after the same tokens.
    node = 4
    history = torch.tensor([[int(tokens[1]), int(tokens[node])]])
    found = ngram_propose(history, int32([2]), max_nodes=3, max_depth=2, extra=extra[:1], min_ngram=min(context, 2))
    assert int(predictions[node]) in packed_trees(found)[0][0]


def test_rejected_predictions_without_rows(device: torch.device) -> None:
    trees = TreeBatch.from_trees([], max_nodes=4, device=device)
    none = torch.empty(0, dtype=torch.int64)
    assert rejected_predictions(trees, none, none, torch.empty(0, 1, dtype=torch.int32)).shape == (0, 24)


# medusa_propose -------------------------------------------------------------------------------------------------------


def test_medusa_ranks_with_gaps(backend: str) -> None:
    """A node has its path's rank, however many siblings exist."""
    tree = DraftTree.from_paths([[0], [4], [4, 2]])
    draft = medusa_propose(torch.arange(18.0).reshape(1, 2, 9), tree)
    assert packed_trees(draft)[0] == ([-1, 8, 4, 6], [-1, 0, 0, 2])
    with pytest.raises(ValueError, match=r"tree: expected child ranks below 4 \(V\), got 4"):
        medusa_propose(torch.randn(1, 2, 4), tree)


# decoy_propose --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_nodes", [7, 9, 10, 40])
def test_decoy_trees(device: torch.device, max_nodes: int) -> None:
    """Right tokens are each other's last children, never at their depth's row; -1 past the end."""
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_nodes": 8}, "max_nodes: expected 9 to 1024, got 8"),
        ({"max_depth": 0}, "max_depth: expected at least 1, got 0"),
        ({"lengths": torch.zeros(1, dtype=torch.int32)}, r"lengths: expected shape \[2\], got \[1\]"),
        ({"active": torch.zeros(2, dtype=torch.int32)}, "active: expected torch.bool, got torch.int32"),
    ],
)
def test_decoys_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoy_propose(**{**calls.make("decoy_propose").arguments, **changes})
