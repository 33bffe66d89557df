"""Logits, draft_probs and grammar masks beyond 2^31 elements, in sparse memory, equal small ones."""

from __future__ import annotations

import pytest
import torch
from huge_case import sparse
from torch import Tensor
from verify_case import batch_of, streams

from pagedtree import (
    SamplingParams,
    Verdict,
    sample,
    verify_block,
    verify_greedy,
    verify_rejection,
    verify_sampled,
    verify_traversal,
    verify_typical,
)

ROWS, VOCAB = 6, 77
FAR = (1 << 32) // (ROWS - 1) + 101  # the last rows start beyond 2^31 elements, and 2^32
PARAMS = SamplingParams(temperature=0.9, top_k=40)


def far_apart(small: Tensor) -> Tensor:
    huge = sparse(tuple(small.shape), (FAR, 1), small.dtype)
    huge[:] = small
    return huge


def many_rows(small: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a tensor beyond 2^32 elements that ends with the rows, and their indices."""
    count = (1 << 32) // small.shape[1] + 100
    huge = sparse((count, small.shape[1]), (small.shape[1], 1), small.dtype)
    huge[-small.shape[0] :] = small
    return huge, torch.arange(count - small.shape[0], count)


def verdicts(shape: list[int], logits: Tensor, mask: Tensor, drafts: Tensor, probs: Tensor, rows: Tensor | None):
    """Returns each op's verdict on one tree."""
    trees, words = batch_of([shape], torch.device("cpu")), streams(1, torch.device("cpu"), 5)
    found: list[Verdict] = [
        verify_greedy(logits, drafts, trees, grammar_mask=mask),
        verify_sampled(logits, drafts, trees, PARAMS, grammar_mask=mask, **words),
        verify_typical(logits, drafts, trees, PARAMS, grammar_mask=mask),
        verify_rejection(logits, drafts, trees, PARAMS, draft_law="onehot", grammar_mask=mask, **words),
    ]
    for op in (verify_rejection, verify_block, verify_traversal):
        fields = {"draft_law": "iid", "draft_probs": probs, "draft_rows": rows, "grammar_mask": mask, **words}
        found.append(op(logits, drafts, trees, PARAMS, **fields))
        found.append(op(logits, drafts, trees, PARAMS, draft_params=PARAMS, **fields))
    return found


@pytest.mark.parametrize("shape", [[-1, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 1, 3]], ids=["chain", "tree"])
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_verification(backend, shape, packed):
    if backend == "cuda":
        pytest.skip("memory of a GPU is not sparse")
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(ROWS, VOCAB, generator=generator).to(torch.bfloat16) * 3
    probs = (logits.float() + torch.randn(ROWS, VOCAB, generator=generator) / 2).softmax(-1)
    drafts = torch.zeros(ROWS, dtype=torch.int64)
    for node, parent in enumerate(shape[1:], 1):
        drafts[node] = logits[parent].argmax() if node < 4 else probs[parent].argmax()
    mask = torch.rand(ROWS, VOCAB, generator=generator) < 0.9
    mask[:, drafts] = True
    if packed:
        bits = torch.nn.functional.pad(mask, (0, -VOCAB % 32)).view(ROWS, -1, 32).long()
        mask = (bits << torch.arange(32)).sum(-1).int()
    expected = verdicts(shape, logits, mask, drafts, probs, None)
    assert any((verdict.num_accepted > 2).any() for verdict in expected)
    all_probs, rows = many_rows(probs.half())
    for got, again in (
        (verdicts(shape, far_apart(logits), far_apart(mask), drafts, far_apart(probs), None), expected),
        (
            verdicts(shape, logits, mask, drafts, all_probs, rows),
            verdicts(shape, logits, mask, drafts, probs.half(), None),
        ),
    ):
        for a, b in zip(got, again, strict=True):
            assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_sample(backend):
    if backend == "cuda":
        pytest.skip("memory of a GPU is not sparse")
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    words = streams(ROWS, torch.device("cpu"))
    assert sample(far_apart(logits), PARAMS, **words).equal(sample(logits, PARAMS, **words))
