"""verify_sampled: the tokens are those of decoding without drafts, whatever is drafted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from verify_case import batch_of

from pagedtree import DraftTree, SamplingParams, TreeBatch, reference, sample, verify_sampled


@pytest.mark.parametrize("drafter", ["best", "worst", "all_siblings", "duplicates", "none"])
def test_output_does_not_depend_on_the_drafter(device, drafter):
    """A seeded generation step by step: always the tokens of plain sampling."""
    vocab, length, generator = 7, 24, torch.Generator().manual_seed(1)
    table = (torch.randn(vocab, vocab, generator=generator) * 1.5).to(device)  # logits after each token
    seed = torch.tensor([42], device=device)
    params = SamplingParams(top_p=0.9)

    def plain() -> list[int]:
        tokens, last = [], 0
        for position in range(length):
            at = torch.tensor([position], device=device)
            last = int(sample(table[last : last + 1], params, seeds=seed, positions=at))
            tokens.append(last)
        return tokens

    tokens, position, steps = [0], 0, 0
    while position < length:
        last = tokens[-1]
        if drafter == "all_siblings":
            parents, drafts = [-1] + [0] * vocab, [last, *range(vocab)]
        elif drafter == "duplicates":
            parents, drafts = [-1, 0, 0, 0, 1, 2, 2, 5], [last, 3, 3, 3, 1, 3, 3, 3]
        elif drafter == "none":
            parents, drafts = [-1], [last]
        else:  # a chain of the likeliest or the least likely successors
            parents, drafts = [-1, 0, 1, 2], [last]
            for _ in range(3):
                row = table[drafts[-1]]
                drafts.append(int(row.argmax() if drafter == "best" else row.argmin()))
        trees = batch_of([parents], device)
        verdict = verify_sampled(
            table[drafts],
            torch.tensor(drafts, device=device),
            trees,
            params,
            seeds=seed,
            positions=torch.tensor([position], device=device),
        )
        count = int(verdict.num_accepted[0]) + 1
        tokens += verdict.tokens[0, :count].tolist()
        position += count
        steps += 1
    assert tokens[1 : length + 1] == plain()
    assert steps < length if drafter in ("best", "all_siblings") else steps <= length


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
    rest = sample(
        table[first].to(device), SamplingParams(**params), seeds=at["seeds"], positions=at["positions"] + 1
    ).cpu()
    assert (second >= 0).float().mean() > 0.05
    second = torch.where(second >= 0, second, rest)
    distributions = np.stack([reference.distribution(reference.clean_logits(row), **params) for row in table])
    expected = distributions[vocab][:, None] * distributions[:vocab] * count
    seen = np.bincount((first * vocab + second).numpy(), minlength=vocab * vocab).reshape(vocab, vocab)
    assert seen[expected == 0].sum() == 0
    bins = expected >= 5
    statistic = ((seen[bins] - expected[bins]) ** 2 / expected[bins]).sum()
    assert statistic < bins.sum() + 10 * math.sqrt(2 * bins.sum())
