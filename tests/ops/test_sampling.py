"""SamplingParams and sample: distribution, filters, noise, independence."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from support.batches import random_words
from support.exact import LIMIT, excess
from torch import Tensor

from pagedtree import SamplingParams, reference, sample
from pagedtree.check.cases.verification import SAMPLINGS


def draw_many(row: Tensor, count: int, device: torch.device, **sampling) -> np.ndarray:
    """Draws `count` tokens from one uncopied row."""
    rows = row.to(device).expand(count, -1)
    seeds, positions = torch.full((count,), 7, device=device), torch.arange(count, device=device)
    return sample(rows, SamplingParams(**sampling), seeds=seeds, positions=positions).cpu().numpy()


def test_philox_known_answers():
    # Random123's vectors of philox4x32-10.
    vectors = [
        ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]
    for inputs, expected in vectors:
        words = np.array([int(word, 16) for word in inputs.split()], dtype=np.uint32)
        answer = reference.philox4x32(words[:4], words[4:])
        assert [f"{word:08x}" for word in answer] == expected.split()


@lru_cache
def noise_of_two_tokens(count: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns seeds, positions, token pairs and their noise: extreme noise words, then random tokens."""
    positions, words = 200_000, []
    for use in (reference.GUMBEL, reference.GUMBEL | reference.OTHERS):
        counter = np.zeros((positions, 4), dtype=np.uint32)
        counter[:, 0], counter[:, 3] = np.arange(positions), use
        words.append(reference.philox4x32(counter, np.zeros((positions, 2), dtype=np.uint32)))
    first = words[1][:, 0] >> 29
    pairs = np.stack([first, np.where(first == 0, 1, 0)], axis=1)  # noise words 0 and 1
    orders = np.argsort(words[0][:, 0]), np.argsort(words[1][:, 1])
    ends = np.concatenate([order[part] for order in orders for part in (slice(200), slice(-200, None))])
    anywhere = torch.rand(count, vocab, generator=torch.Generator().manual_seed(0)).topk(2).indices
    tokens = torch.cat([torch.from_numpy(pairs[ends].astype(np.int64)), anywhere])
    seeds = torch.cat([torch.zeros(len(ends), dtype=torch.int64), random_words(count, 1)])
    where = torch.cat([torch.from_numpy(ends), random_words(count, 2)])
    noise = [reference.gumbel_noise(int(s), int(p), vocab)[t] for s, p, t in zip(seeds, where, tokens, strict=True)]
    assert np.max(noise) > 13.5 and np.min(noise) < -2.5
    return seeds, where, tokens, torch.from_numpy(np.stack(noise))


def test_noise_of_a_token(device):
    """The winner of scores 1e-5 apart confirms both tokens' noise to that accuracy."""
    seeds, positions, places, noise = noise_of_two_tokens(600, 1100)
    for sign, winner in ((1, 0), (-1, 1)):
        logits = torch.full((len(seeds), 1100), -math.inf)
        scores = torch.stack([noise[:, 1] - noise[:, 0] + sign * 1e-5, torch.zeros(len(seeds))], dim=1)
        logits.scatter_(1, places, scores.float())
        tokens = sample(logits.to(device), SamplingParams(), seeds=seeds.to(device), positions=positions.to(device))
        assert tokens.cpu().equal(places[:, winner])


@pytest.mark.parametrize("vocab", [*(pytest.param(size, marks=pytest.mark.slow) for size in (2, 5, 16)), 33])
@pytest.mark.parametrize("sampling", [sampling for name, sampling in SAMPLINGS.items() if name != "greedy"], ids=str)
def test_chi_square(device, draws, vocab, sampling):
    count = draws(20_000)
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    p = reference.distribution(reference.clean_logits(row), **sampling)
    counts = np.bincount(draw_many(row, count, device, **sampling), minlength=vocab)
    assert excess(counts, p) < LIMIT


def test_seeds_and_positions_are_independent_streams(device, draws):
    """Neighbouring positions or seeds draw all 16 pairs equally often."""
    count = draws(40_000)
    rows = torch.zeros(count + 1, 4, device=device)
    ascending, fixed = torch.arange(count + 1, device=device), torch.full((count + 1,), 5, device=device)
    for seeds, positions in ((ascending, fixed), (fixed, ascending)):
        tokens = sample(rows, SamplingParams(), seeds=seeds, positions=positions).cpu().numpy()
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        assert excess(pairs, np.full(16, 1 / 16)) < LIMIT


def kept(row: Tensor, device: torch.device, count: int = 1000, **sampling) -> list[int]:
    """Returns tokens of many draws: all kept ones, if none is rare."""
    return sorted(set(draw_many(row, count, device, **sampling).tolist()))


def test_filter_sets_of_the_contract(backend, device):
    probabilities = torch.tensor([0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03])
    row, count = probabilities.log(), 600 if backend == "cpu" else 250
    assert kept(row, device, count, top_k=4, top_p=0.82, filter_order="joint") == [0, 1, 2, 3]
    assert kept(row, device, count, top_k=4, top_p=0.82) == [0, 1, 2]
    assert kept(row, device, count, top_k=5) == list(range(9)), "every tie of the k-th stays"
    assert kept(row, device, count, top_p=0.90) == [0, 1, 2, 3, 4, 5], "of equal tokens the lower ids"
    assert kept(row, device, count, min_p=0.5) == [0, 1, 2]
    assert kept(row, device, count, min_p=0.5, top_p=0.7) == [0, 1], "top_p of what min_p left"
    assert kept(row, device, count, min_p=0.5, top_p=0.7, filter_order="joint") == [0, 1, 2]
    for off in (0, -1, 9, 2**31 - 1, 2**40):
        assert kept(row, device, count, top_k=off) == list(range(9))


def test_zeros_of_either_sign_are_equal(device):
    row = torch.tensor([-1.0, -0.0, 0.0, -2.0])
    assert kept(row, device, top_k=1) == [1, 2]
    assert kept(row, device, temperature=0.0) == [1]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-9, 1e9, 3e38, math.inf])
def test_extreme_temperatures(device, temperature):
    largest = torch.finfo(torch.float32).max
    row = torch.tensor([1.0, 3.0, 2.0, -math.inf, 3.0, -5.0])
    assert kept(row, device, temperature=temperature) == ([1, 4] if temperature < 1 else [0, 1, 2, 4, 5])
    assert kept(torch.tensor([-largest, largest, 0.0]), device, temperature=1.0) == [1]


def test_top_k_of_either_integer_type(device):
    rows, stream = torch.randn(6, 40, device=device), torch.arange(6, device=device)
    wide = torch.tensor([1, 3, 0, -1, -(2**40), 2**40], device=device)
    narrow = torch.tensor([1, 3, 0, -1, -1, 2**31 - 1], dtype=torch.int32, device=device)
    tokens = [sample(rows, SamplingParams(top_k=k), seeds=stream, positions=stream) for k in (wide, narrow)]
    assert torch.equal(*tokens) and wide.tolist()[-1] == 2**40


def test_tensor_parameters_are_clamped(device):
    rows = torch.tensor([0.0, 1.0, 2.0, 3.0], device=device).expand(600, -1)
    streams = {"seeds": torch.zeros(600, dtype=torch.int64), "positions": torch.arange(600)}
    streams = {name: stream.to(device) for name, stream in streams.items()}

    def seen(**values: float) -> list[int]:
        dtypes = {"top_k": torch.int32}
        tensors = {
            name: torch.tensor([value], dtype=dtypes.get(name, torch.float32), device=device)
            for name, value in values.items()
        }
        return sorted(set(sample(rows, SamplingParams(**tensors), **streams).tolist()))

    everything = [0, 1, 2, 3]
    assert seen(temperature=-1.0) == [3]
    assert seen(temperature=math.nan) == everything
    assert seen(top_k=-7) == everything
    assert seen(top_p=0.0) == seen(top_p=-1.0) == seen(top_p=-math.inf) == [3]
    assert seen(top_p=2.0) == seen(top_p=math.nan) == everything
    assert seen(min_p=-1.0) == seen(min_p=math.nan) == seen(min_p=1e-42) == everything
    assert seen(min_p=2.0) == [3]


@pytest.mark.parametrize(
    ("field", "values", "error"),
    [
        ("temperature", [-0.1, math.nan], ValueError),
        ("top_k", [-2], ValueError),
        ("top_p", [0.0, 1.1, math.nan], ValueError),
        ("min_p", [-0.1, 1.5], ValueError),
        ("filter_order", ["top_p_first"], ValueError),
        ("temperature", ["1"], TypeError),
        ("top_k", [1.5, True], TypeError),
        ("top_p", [None], TypeError),
        ("filter_order", [3], TypeError),
    ],
)
def test_host_scalars_are_refused(field, values, error):
    for value in values:
        with pytest.raises(error, match=field):
            SamplingParams(**{field: value})
