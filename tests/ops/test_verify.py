"""verify_sampled: the tokens are those of decoding without drafts, whatever is drafted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from simt_case import base_of, intercepted_launches, simt_library, symbols_of

from pagedtree import DraftTree, SamplingParams, TreeBatch, reference, sample, verify_greedy, verify_sampled
from pagedtree.testing import use_backend


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
def test_distribution_of_the_first_tokens(device, draws, dtype):
    """The joint distribution of the first two tokens of many seeds, with adversarial drafts: p(a) p(b | a)."""
    count, vocab = draws(30_000), 4
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab + 1, vocab, generator=generator).to(dtype)  # the last row is the prompt's
    params = {"temperature": 0.9, "top_p": 0.95}
    order = table[vocab].float().argsort()  # the least likely token first
    drafts = torch.stack([order.new_tensor(0), order[0], order[2]])
    logits = table[torch.tensor([vocab, int(order[0]), int(order[2])])]
    trees = TreeBatch.from_trees([DraftTree([-1, 0, 0])] * count, device=device)
    at = {"seeds": torch.arange(count, device=device), "positions": torch.full((count,), 3, device=device)}
    verdict = verify_sampled(
        logits.to(device).repeat(count, 1), drafts.to(device).repeat(count), trees, SamplingParams(**params), **at
    )
    first = verdict.tokens[:, 0].cpu()
    second = verdict.tokens[:, 1].cpu()
    samples = sample(
        table[first].to(device), SamplingParams(**params), seeds=at["seeds"], positions=at["positions"] + 1
    ).cpu()
    assert (second >= 0).float().mean() > 0.05
    second = torch.where(second >= 0, second, samples)
    distributions = np.stack([reference.distribution(reference.clean_logits(row), **params) for row in table])
    expected = distributions[vocab][:, None] * distributions[:vocab] * count
    counts = np.bincount((first * vocab + second).numpy(), minlength=vocab * vocab).reshape(vocab, vocab)
    assert counts[expected == 0].sum() == 0
    bins = expected >= 5
    statistic = ((counts[bins] - expected[bins]) ** 2 / expected[bins]).sum()
    assert statistic < bins.sum() + 10 * math.sqrt(2 * bins.sum())


@pytest.mark.skipif(simt_library() is None, reason="built without simt")
@pytest.mark.parametrize(("batch", "at_once"), [(1, True), (8, False)])
@pytest.mark.parametrize("params", [None, SamplingParams(top_p=0.9)], ids=["greedy", "top-p"])
def test_few_rows_are_read_at_once(monkeypatch, params, batch, at_once):
    """11 SMs read 64 rows in 6 rounds; a walk reads 5 rows in 5, but has more to do for each of them."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "11:227:1")
    library, kernels = simt_library(), []

    def note(kernel, *_):
        kernels.append(symbols_of(library)[kernel - base_of(library)])
        return 1

    trees = TreeBatch.from_trees([DraftTree([*range(-1, 8), *[0] * 55])] * batch)
    rows, at = (torch.zeros(64 * batch, 4096), torch.zeros(64 * batch, dtype=torch.int64)), torch.arange(batch)
    with use_backend("simt"), intercepted_launches(library, note):
        verify_sampled(*rows, trees, params, seeds=at, positions=at) if params else verify_greedy(*rows, trees)
    assert any("draw_rows" in name for name in kernels) == at_once
