"""chain_speculative_sampling in FlashInfer's conventions: its example, plain loops, the output's distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import seeded
from support.devices import placed
from support.exact import LIMIT, excess
from torch import Tensor

from pagedtree.integrations.flashinfer import chain_speculative_sampling


def random_distributions(rng: np.random.Generator, *shape: int) -> Tensor:
    return placed(torch.from_numpy(rng.dirichlet(np.full(shape[-1], 0.7), shape[:-1])).float())


def random_chains(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns draft and target distributions and drafts of 50 chains of 4."""
    rng = np.random.default_rng(0)
    target = random_distributions(rng, 50, 5, vocab)
    return random_distributions(rng, 50, 4, vocab), target, torch.randint(vocab, (50, 4))


@pytest.mark.parametrize("seed", range(5))
def test_documented_example(device, seed) -> None:
    draft = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]], device=device)
    target = torch.tensor([[[0, 0.1, 0.6, 0.3], [1.0, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]]], device=device)
    ids = torch.tensor([[2, 1]], dtype=torch.int32, device=device)
    tokens, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=seed, offset=0)
    assert tokens.dtype == torch.int32
    assert (tokens.tolist(), accepted.tolist(), emitted.tolist()) == ([[2, 0, -1]], [1], [1])


def test_counts_are_added(on_device) -> None:
    draft, target, ids = random_chains(5)
    accepted, emitted = torch.full((50,), 100, dtype=torch.int64), torch.full((50,), 200, dtype=torch.int32)
    again = chain_speculative_sampling(draft, ids, target, generator=seeded(3))
    result = chain_speculative_sampling(draft, ids, target, accepted, emitted, generator=seeded(3))
    assert result[1] is accepted and result[2] is emitted
    assert torch.equal(result[0], again[0])
    assert torch.equal(accepted - 100, again[1]) and torch.equal(emitted - 200, again[2])
    assert (again[1] >= again[2]).all() and (again[1] > again[2]).any()
    lengths = (again[0] >= 0).sum(1) - 1
    assert torch.equal(lengths, again[2])
    for row, drafts, n in zip(again[0].tolist(), ids.tolist(), again[2].tolist(), strict=True):
        assert row[:n] == drafts[:n]


def test_seeds() -> None:
    draft, target, ids = random_chains(9)
    runs = [
        chain_speculative_sampling(draft, ids, target, seed=s, offset=o)[0] for s, o in ((1, 0), (1, 0), (1, 5), (2, 0))
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2]) and not torch.equal(runs[0], runs[3])


@pytest.mark.parametrize("vocab", [5, 41])
def test_distribution_of_the_first_two_tokens(on_device, draws, vocab) -> None:
    """First tokens follow the target's distribution, accepted or not."""
    rng = np.random.default_rng(vocab)
    count = draws(60_000)
    draft, target = random_distributions(rng, 2, vocab), random_distributions(rng, 3, vocab)
    generator = seeded(1)
    ids = torch.stack([torch.multinomial(distribution, count, True, generator=generator) for distribution in draft], 1)
    tokens, _, emitted = chain_speculative_sampling(
        draft.expand(count, 2, vocab), ids, target.expand(count, 3, vocab), generator=generator
    )
    tokens = tokens.long()
    for column, rows in ((0, torch.ones(count, dtype=torch.bool)), (1, emitted > 0)):
        p = (target[column].double() / target[column].sum()).cpu().numpy()
        assert excess(tokens[rows, column].bincount(minlength=vocab).cpu().numpy(), p) < LIMIT, column


def test_an_id_outside_ends_the_chain(on_device) -> None:
    rng = np.random.default_rng(0)
    draft = random_distributions(rng, 2, 3, 5)
    ids = torch.tensor([[1, -1, 2], [1, 2, 5]])
    target = torch.nn.functional.one_hot(torch.tensor([[1, 4, 2, 3], [1, 2, 0, 3]]), 5).float()
    tokens, accepted, emitted = chain_speculative_sampling(draft + 1e-6, ids, target)
    assert tokens.tolist() == [[1, 4, -1, -1], [1, 2, 0, -1]]
    assert (accepted.tolist(), emitted.tolist()) == ([2, 2], [1, 2])
