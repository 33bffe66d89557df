"""The backends draw the same tokens, follow the same paths and grow the same trees, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from test_sampling import HALF_TYPES, LAWS, random_words
from torch import Tensor

from pagedtree import (
    DraftTree,
    SamplingParams,
    TreeBatch,
    expand_tree,
    sample,
    start_draft,
    verify_greedy,
    verify_sampled,
)
from pagedtree.testing import backends, use_backend

pytestmark = pytest.mark.skipif(backends() == ["cpu"], reason="this build has one backend")
OTHERS = [name for name in backends() if name != "cpu"]


def rows_of(vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary rows, ties, and rows that are not finite; the row stride leaves every second row unaligned."""
    logits = torch.randn(12, vocab + 3, generator=torch.Generator().manual_seed(seed)) * 4
    logits[1] = 0.25
    logits[2] = logits[2].round()
    logits[3, ::2] = math.nan
    logits[4] = -math.inf
    logits[5, vocab // 2] = math.inf
    logits[6] *= 1e-6
    logits[7, : vocab // 2] = -math.inf
    return logits.to(dtype)[:, :vocab]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 6, 129, 1000, 9001])
def test_sample(other, dtype, vocab):
    device = "cuda" if other == "cuda" else "cpu"
    logits, seeds, positions = rows_of(vocab, dtype), random_words(12), random_words(12, 1)
    for law in LAWS:
        expected = sample(logits, SamplingParams(**law), seeds=seeds, positions=positions)
        with use_backend(other):
            got = sample(
                logits.to(device), SamplingParams(**law), seeds=seeds.to(device), positions=positions.to(device)
            )
        assert got.cpu().equal(expected), law


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("batch", [1, 2, 30])
def test_verify(other, batch):
    """Few trees have all their rows drawn at once, many are walked row by row."""
    device = "cuda" if other == "cuda" else "cpu"
    generator = torch.Generator().manual_seed(batch)
    shapes = [DraftTree([-1, *[int(torch.randint(i, (), generator=generator)) for i in range(1, 9)]])] * batch
    results = []
    for name, place in (("cpu", "cpu"), (other, device)):
        generator.manual_seed(batch)
        trees = TreeBatch.from_trees(shapes, max_depth=8, device=place)
        rows = trees.parents.shape[0]
        logits = (torch.randn(rows, 40, generator=generator) * 2).to(torch.bfloat16)
        allowed = torch.rand(rows, 40, generator=generator) < 0.8
        drafts = torch.where(torch.rand(rows, generator=generator) < 0.7, logits.argmax(1).roll(1), 3)
        seeds, positions = random_words(batch).to(place), random_words(batch, 1).to(place)
        arguments = (logits.to(place), drafts.to(place), trees)
        with use_backend(name):
            results.append(verify_greedy(*arguments, grammar_mask=allowed.to(place)))
            for law in LAWS:
                results.append(
                    verify_sampled(*arguments, SamplingParams(**law), seeds=seeds, positions=positions)
                )  # fmt: skip
    half = len(results) // 2
    for expected, got in zip(results[:half], results[half:], strict=True):
        assert all(a.equal(b.cpu()) for a, b in zip(expected, got, strict=True))
    assert any((verdict.num_accepted > 1).any() for verdict in results)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("law", ["topk", "iid", "swor", "coupled"])
def test_expand(other, dtype, law):
    """Tokens, scores, laws, two levels."""
    results = []
    for name, place in (("cpu", "cpu"), (other, "cuda" if other == "cuda" else "cpu")):
        with use_backend(name):
            for vocab in (41, 3001):
                sampled = {
                    "params": SamplingParams(temperature=0.9, top_p=0.95),
                    "seeds": random_words(12).to(place),
                    "positions": random_words(12, 1).to(place),
                }
                options = {"num_children": 7, "law": law, **(sampled if law != "topk" else {})}
                state = start_draft(torch.arange(12, device=place), max_kv_nodes=40)
                state = expand_tree(state, rows_of(vocab, dtype).to(place), num_frontier=3, **options)
                state = expand_tree(state, rows_of(vocab, dtype, seed=1).repeat(3, 1).to(place), **options)
                results.append([state.tokens, state.parents, state.scores, state.frontier, *state.draft_probs])
    half = len(results) // 2
    for expected, got in zip(results[:half], results[half:], strict=True):
        assert all(a.equal(b.cpu()) for a, b in zip(expected, got, strict=True))
