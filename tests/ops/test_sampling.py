"""SamplingParams and sample: the distribution, the filters, the noise, and what they must not depend on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest
import torch
from device_case import slow_on_simt
from sampling_case import HALF_TYPES, SAMPLINGS, random_words
from torch import Tensor

from pagedtree import SamplingParams, reference, sample
from pagedtree._ops import ops


@pytest.fixture(scope="module", autouse=True)
def noise_is_kept() -> Iterator[None]:
    """Every set of parameters, dtype and backend meets the same noise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.sampling, "gumbel_noise", lru_cache(1024)(reference.gumbel_noise))
        yield


def draw_many(row: Tensor, count: int, device: torch.device, **sampling) -> np.ndarray:
    """`count` independent draws from one row, which is not copied."""
    rows = row.to(device).expand(count, -1)
    seeds, positions = torch.full((count,), 7, device=device), torch.arange(count, device=device)
    return sample(rows, SamplingParams(**sampling), seeds=seeds, positions=positions).cpu().numpy()


def chi_square_limit(df: int) -> float:
    return df + 10 * math.sqrt(2 * df)


def test_philox_known_answers():
    # Random123's vectors for philox4x32-10.
    vectors = [
        ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]
    for given, expected in vectors:
        words = np.array([int(word, 16) for word in given.split()], dtype=np.uint32)
        answer = reference.philox4x32(words[:4], words[4:])
        assert [f"{word:08x}" for word in answer] == expected.split()


@lru_cache
def noise_of_two_tokens(count: int) -> tuple[Tensor, Tensor, np.ndarray]:
    seeds = random_words(count, 1)
    positions = random_words(count, 2)
    # The rarest words too, both ends of the noise: the smallest and largest among many positions of one seed.
    counter = np.zeros((400_000, 4), dtype=np.uint32)
    counter[:, 0] = np.arange(400_000)
    words = reference.philox4x32(counter, np.zeros((400_000, 2), dtype=np.uint32))[:, 0]
    order = np.argsort(words)
    extremes = torch.from_numpy(np.concatenate([order[:500], order[-500:]]))
    seeds = torch.cat([seeds, torch.zeros(1000, dtype=torch.int64)])
    positions = torch.cat([positions, extremes])
    noise = np.stack([reference.gumbel_noise(int(s), int(p), 2) for s, p in zip(seeds, positions, strict=True)])
    assert noise.max() > 12 and noise.min() < -2.4
    return seeds, positions, noise


def test_noise_of_a_token(device):
    """Two tokens whose scores differ by 1e-5: the winner tells each token's noise to that accuracy, any word of it."""
    shift, (seeds, positions, noise) = 1e-5, noise_of_two_tokens(4000)
    tie = torch.from_numpy(noise[:, 1] - noise[:, 0])
    for sign, winner in ((1, 0), (-1, 1)):
        logits = torch.stack([tie + sign * shift, torch.zeros_like(tie)], dim=1).float()
        drawn = sample(logits.to(device), SamplingParams(), seeds=seeds.to(device), positions=positions.to(device))
        assert (drawn.cpu() == winner).all()


@pytest.mark.parametrize(("dtype", "levels"), [(torch.bfloat16, 4), (torch.float32, 60), (torch.float16, 1000)])
def test_top_k_where_few_logits_are_sorted(device, dtype, levels):
    """From one to several hundred tokens, most of them ties: the largest logits are sorted only while they are few."""
    generator = torch.Generator().manual_seed(levels)
    logits = (torch.randint(levels, (9000,), generator=generator) * (8 / levels)).to(dtype)
    for top_k in (1, 127, 128, 129, 257):
        for rest in ({}, {"top_p": 0.5, "min_p": 0.3}, {"min_p": 0.97}):
            drawn = draw_many(logits, 3, device, top_k=top_k, **rest)
            p = reference.distribution(reference.clean_logits(logits), top_k=top_k, **rest)
            for position in range(3):
                token, margin = reference.sample_row(p, 7, position)
                assert drawn[position] == token or margin <= 1e-5, (top_k, rest, position)


LARGE = [32000, 65535, 65536, 65537, 128256, 262144 + 3]
SHAPES = ["peaked", "flat", "equal", "far_below", "near_flat"]


@pytest.mark.parametrize(
    ("shape", "vocab"),
    [  # in the core suite each shape with one size
        pytest.param(shape, vocab, marks=[] if (i + j) % 6 == 0 else pytest.mark.slow)
        for i, vocab in enumerate(LARGE)
        for j, shape in enumerate(SHAPES)
    ],
)
def test_large_vocabularies(device, shape, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator)
    if shape == "peaked":
        logits = logits * 3
        logits[torch.randint(vocab, (20,), generator=generator)] += 15
    elif shape == "equal":
        logits.fill_(-3.25)
    elif shape == "far_below":  # one token carries the row, the others weigh nothing at all
        logits = logits - 60
        logits[vocab // 2] = 0.0
    elif shape == "near_flat":
        logits = torch.arange(vocab) * 1e-4 / 8
    dtype = torch.float32 if shape == "near_flat" else torch.bfloat16
    row = logits.to(dtype)
    samplings = [
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": vocab - 2},
        {"top_k": 1000, "top_p": 0.5, "min_p": 1e-3, "temperature": 1.5},
        {"top_p": 1e-6},
    ]
    for i, sampling in enumerate(samplings):
        drawn = draw_many(row, 2, device, **sampling)
        p = reference.distribution(reference.clean_logits(row), **sampling)
        for position in range(2):
            token, margin = reference.sample_row(p, 7, position)
            assert margin < 1e-5 or drawn[position] == token, (i, position, margin)


@pytest.mark.parametrize("vocab", [*(pytest.param(size, marks=pytest.mark.slow) for size in (2, 5, 16)), 33])
@pytest.mark.parametrize(
    "sampling", [sampling for sampling in SAMPLINGS if sampling.get("temperature") != 0.0], ids=str
)
def test_chi_square(device, draws, vocab, sampling):
    count = draws(20_000)
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    p = reference.distribution(reference.clean_logits(row), **sampling)
    seen = np.bincount(draw_many(row, count, device, **sampling), minlength=vocab)
    assert seen[p == 0].sum() == 0
    bins = p * count >= 5
    expected, observed = p[bins] * count, seen[bins]
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < chi_square_limit(max(int(bins.sum()) - 1, 1))


def test_seeds_and_positions_are_independent_streams(device, draws):
    """Pairs of draws at neighbouring positions and at neighbouring seeds: all 16 pairs equally often."""
    count = draws(40_000)
    rows = torch.zeros(count + 1, 4, device=device)
    ascending, fixed = torch.arange(count + 1, device=device), torch.full((count + 1,), 5, device=device)
    for seeds, positions in ((ascending, fixed), (fixed, ascending)):
        drawn = sample(rows, SamplingParams(), seeds=seeds, positions=positions).cpu().numpy()
        pairs = np.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16)
        statistic = ((pairs - count / 16) ** 2 / (count / 16)).sum()
        assert statistic < chi_square_limit(15)


def kept(row: Tensor, device: torch.device, count: int = 1000, **sampling) -> list[int]:
    """The tokens that come up in many draws: all that the filters keep, when none is rare."""
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


@slow_on_simt
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_kept_sets(backend, device, seed):
    """Exact membership against sorting; values on a coarse grid, so that ties sit on most boundaries."""
    if backend == "simt" and seed > 0:
        pytest.skip("one of these cases is long enough on simt")
    generator = torch.Generator().manual_seed(seed)
    vocab = int(torch.randint(2, 40, (1,), generator=generator))
    row = torch.randint(-6, 7, (vocab,), generator=generator) / 8.0
    for sampling in SAMPLINGS[3:]:
        logits = reference.clean_logits(row)
        temperature = sampling.get("temperature", 1.0)
        weights = np.exp((logits - logits.max()) / temperature)
        others = {"top_k": sampling.get("top_k", 0), "min_p": sampling.get("min_p", 0.0)}
        order = sampling.get("filter_order", "top_k_first")
        sets = {
            tuple(np.flatnonzero(reference.kept_tokens(logits, temperature, top_p=top_p, filter_order=order, **others)))
            for top_p in (sampling.get("top_p", 1.0) + shift for shift in (0.0, -1e-4, 1e-4))
            if 0 < top_p <= 1
        }
        assert weights.min() > 0.01
        assert tuple(kept(row, device, 1000 if backend == "simt" else 3000, **sampling)) in sets


def test_zeros_of_either_sign_are_equal(device):
    row = torch.tensor([-1.0, -0.0, 0.0, -2.0])
    assert kept(row, device, top_k=1) == [1, 2]
    assert kept(row, device, temperature=0.0) == [1]


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_rows_that_are_not_finite(device, dtype):
    nan, inf = math.nan, math.inf
    sampling = {"top_k": 1, "top_p": 0.5}
    for row in ([nan] * 5, [-inf] * 5, [nan, -inf, nan, -inf, -inf]):
        logits = torch.tensor(row, dtype=dtype)
        assert kept(logits, device, **sampling) == list(range(5)), "uniform, whatever the filters say"
        assert kept(logits, device, temperature=0.0) == [0]
    logits = torch.tensor([0.0, nan, 1.0, -inf, nan], dtype=dtype)
    assert kept(logits, device) == [0, 2]
    assert kept(logits, device, temperature=0.0) == [2]
    logits = torch.tensor([0.0, inf, 60000.0, inf, -inf], dtype=dtype)
    assert kept(logits, device) == [1, 3]
    assert kept(logits, device, temperature=0.0) == [1]
    assert kept(logits, device, temperature=math.inf) == [0, 1, 2, 3], "never a token of logit -inf"


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
    drawn = [sample(rows, SamplingParams(top_k=k), seeds=stream, positions=stream) for k in (wide, narrow)]
    assert torch.equal(*drawn) and wide.tolist()[-1] == 2**40


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


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_rows_at_any_address(device, dtype):
    """Whole words of 16 bytes, and what is left at both ends: nothing outside a row counts, ties go to the first id."""
    generator = torch.Generator().manual_seed(3)
    streams = {"seeds": random_words(3).to(device), "positions": torch.arange(3, device=device)}
    for vocab in (1, 7, 8, 9, 17, 40, 1031):
        rows = (torch.randn(3, vocab, generator=generator) * 2).round().to(dtype)  # many ties
        rows[1] = 0
        for offset in range(9):
            around = torch.full((3 * (vocab + 3) + 20,), torch.nan, dtype=dtype, device=device)
            strided = around[offset : offset + 3 * (vocab + 3)].view(3, vocab + 3)[:, :vocab]
            strided.copy_(rows)
            greedy = sample(strided, SamplingParams(temperature=0.0), **streams)
            assert greedy.tolist() == [int(np.argmax(row.float().numpy())) for row in rows]
            for sampling in ({}, {"top_p": 0.6}, {"top_k": 3, "temperature": 1.5}):
                expected = sample(rows.to(device), SamplingParams(**sampling), **streams)
                assert sample(strided, SamplingParams(**sampling), **streams).tolist() == expected.tolist()


def test_host_scalars_make_one_tensor(device):
    params = SamplingParams(temperature=0.7, top_k=5)
    for first, second in zip(params.on(device)[:4], params.on(device)[:4], strict=True):
        assert first is second
    column = torch.ones(3, device=device)
    assert SamplingParams(temperature=column).on(device)[0] is column
    assert SamplingParams(temperature=torch.tensor(0.5, device=device)).on(device)[0].shape == (1,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("filter_order", "top_p_first"),
    ],
)
def test_host_scalars_out_of_range(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "1"), ("top_k", 1.5), ("top_p", None), ("top_k", True), ("filter_order", 3)]
)
def test_host_scalars_of_wrong_type(field, value):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})


def test_refusals(device):
    logits = torch.zeros(3, 5, device=device)
    streams = {"seeds": torch.zeros(3, dtype=torch.int64), "positions": torch.zeros(3, dtype=torch.int64)}
    good = {"logits": logits, "params": SamplingParams(), **{name: s.to(device) for name, s in streams.items()}}
    sample(**good)
    wrong = [
        ("logits", logits.double(), ValueError, r"`logits` .* dtype torch.float32 or .*bfloat16, got torch.float64"),
        ("logits", logits[0], ValueError, r"`logits` must be of shape \[\*, \*\] .*, got \[5\]"),
        ("logits", logits[:, :0], ValueError, r"`logits` must be of at least one column, got \[3, 0\]"),
        ("logits", torch.empty(3, 2**20 + 1, device=device), ValueError,
         r"`logits` must be of at most 2\^20 columns, got \[3, 1048577\]"),
        ("logits", logits[:, ::2], ValueError, r"`logits` must be contiguous in its last dimension"),
        ("logits", None, TypeError, "logits"),
        ("params", None, TypeError, "params"),
        ("params", SamplingParams(top_k=torch.zeros(3, device=device)), ValueError, r"`top_k` .* dtype torch.int32"),
        ("params", SamplingParams(top_p=torch.ones(2, device=device)), ValueError,
         r"`top_p` must be of shape \[1\] or \[3\], got \[2\]"),
        ("seeds", good["seeds"].int(), ValueError, r"`seeds` must be of dtype torch.int64, got torch.int32"),
        ("positions", good["positions"][:2], ValueError, r"`positions` must be of shape \[3\] .*, got \[2\]"),
    ]  # fmt: skip
    for name, value, error, message in wrong:
        with pytest.raises(error, match=message):
            sample(**{**good, name: value})
    with pytest.raises(RuntimeError, match="filter_order"):
        ops.sample(
            logits, *SamplingParams().on(device)[:4], "neither", seeds=good["seeds"], positions=good["positions"]
        )
