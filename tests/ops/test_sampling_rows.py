"""CUDA kernels' paths (draw ahead of the peak, list, threshold search) give the CPU's bits."""

from __future__ import annotations

import math
import re

import pytest
import torch
from support.batches import random_words
from support.devices import placed
from support.doubles import base_of, intercepted_launches, simt_library, symbols_of
from torch import Tensor

from pagedtree import SamplingParams, sample, token_logprobs
from pagedtree.testing import backends, use_backend

on_gpu_code = pytest.mark.parametrize("backend", [name for name in backends() if name != "cpu"], indirect=True)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCAB = 4219  # ends inside a word
SAMPLINGS = [
    {"temperature": 1.3},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 2.0},
    {"top_k": 40},
    {"top_k": 60, "top_p": 0.6, "min_p": 1e-3},
    {"top_k": 60, "min_p": 1e-3, "temperature": 1.7, "filter_order": "joint"},
    {"top_k": 700, "top_p": 0.3, "min_p": 1e-4},
    {"top_k": 300, "top_p": 0.8, "temperature": 3.0, "filter_order": "joint"},
    {"top_p": 1e-6, "temperature": 0.3},
    {"top_p": 0.5, "temperature": 1e-45},
    {"temperature": 2e-7},  # more winners than are recorded
]


def rows_of(vocab: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    normal = torch.randn(vocab, generator=draw)
    at = torch.randperm(vocab, generator=draw)
    rows = {
        "flat": normal,
        "peaked": normal * 4,
        "ties": (normal * 2).round(),
        "ties by quarters": (normal * 8).round() / 4 - 6,
        "equal": torch.full((vocab,), -2.5),
        "two values": torch.where(normal > 1, 3.0, 1.0),
        "large": normal * 90,
        "far below": normal - 40,
        "the last are far below": torch.where(torch.arange(vocab) < vocab - 3, normal, -3.2e14),
        "with zeros": torch.where(normal > 0.5, normal, math.copysign(0.0, -1.0)),
        "denormal": normal * 1e-40,
        "with both zeros": torch.where(normal > 0, 0.0, math.copysign(0.0, -1.0)),
        "zeros carry it": normal - 30,
        "mostly forbidden": normal.clone(),
        "with infinities": normal.clone(),
        "with NaN": normal.clone(),
        "one is far above": normal - 30,
        "two are far above": normal - 30,  # top_p 0.5 keeps one, in integers
    }
    rows["mostly forbidden"][at[vocab // 50 :]] = -math.inf
    rows["with infinities"][at[:3]] = math.inf
    rows["with NaN"][at[:9]] = math.nan
    rows["one is far above"][at[0]] = 200.0
    rows["two are far above"][at[:2]] = 200.0
    rows["with zeros"][at[:40]] = 0.0
    rows["zeros carry it"][at[:200]] = torch.tensor([0.0, -0.0]).repeat(100)[:vocab]
    return rows


def at_address(row: Tensor, offset: int) -> Tensor:
    """Places the row `offset` elements off alignment."""
    around = torch.full((row.numel() + 16,), math.nan, dtype=row.dtype)
    around[offset : offset + row.numel()] = row
    return around[offset : offset + row.numel()]


@on_gpu_code
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", rows_of(1))
def test_draws_are_those_of_the_cpu(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    draws = 6
    row = at_address(rows_of(VOCAB)[kind].to(dtype), len(kind) % 8)
    rows, streams = row.expand(draws, -1), {"seeds": random_words(draws), "positions": torch.arange(draws)}
    on_device = {name: stream.to(device) for name, stream in streams.items()}
    for sampling in SAMPLINGS:
        params = SamplingParams(**sampling)
        with use_backend("cpu"):
            expected = sample(rows, params, **streams)
        assert sample(placed(rows, device), params, **on_device).tolist() == expected.tolist(), sampling


def sample_by(backend: str, rows: Tensor, sampling: dict[str, float]) -> list[int]:
    with use_backend(backend):
        count = rows.shape[0]
        return sample(
            rows, SamplingParams(**sampling), seeds=random_words(count), positions=torch.arange(count)
        ).tolist()


@pytest.mark.skipif(simt_library() is None, reason="built without simt")
@pytest.mark.parametrize("kind", rows_of(1))
def test_draws_on_chip_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Four CTAs exchange results; rows have three dtypes."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "16:227:4")
    monkeypatch.setenv("PAGEDTREE_ENGINE", "wgmma")
    at = list(rows_of(1)).index(kind)
    row = rows_of(16_512)[kind].to(DTYPES[at % 3])
    for sampling in SAMPLINGS[at % 2 :: 2]:
        assert sample_by("simt", row.expand(2, -1), sampling) == sample_by("cpu", row.expand(2, -1), sampling), sampling


@pytest.mark.skipif(simt_library() is None, reason="built without simt")
@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        ({"temperature": 0.0}, 0),
        ({"min_p": 1e-9}, 0),
        ({"top_p": 0.9}, 0),
        ({"top_k": 150, "top_p": 0.95}, 0),
        ({"top_k": 50, "min_p": 0.2, "filter_order": "joint"}, 0),
        ({"top_k": 513}, 8),
        ({"top_p": 0.99999}, 8),
    ],
    ids=str,
)
def test_rows_of_long_lists_run_in_the_second_kernel(monkeypatch, sampling, left):
    """More than 512 tokens by top-k or top-p are left; min-p alone has no list."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "1:227:1")
    monkeypatch.setenv("PAGEDTREE_ENGINE", "wgmma")
    library, launched = simt_library(), []

    def skip_the_second(kernel, *_):
        launched.append(symbols_of(library)[kernel - base_of(library)])
        return len(launched) - 1

    rows = torch.randn(8, 32_000, generator=torch.Generator().manual_seed(1)).bfloat16() * 6
    with intercepted_launches(library, skip_the_second):
        tokens = sample_by("simt", rows, sampling)
    assert re.findall(r"(sample\w*?)_kernel", " ".join(launched)) == ["sample_sm90", "sample"]
    assert sum(token < 0 for token in tokens) == left


@on_gpu_code
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["flat", "ties by quarters", "equal", "with both zeros", "mostly forbidden"])
def test_kept_tokens_are_those_of_the_cpu(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """Ties at top-p's threshold keep the first tokens."""
    row = rows_of(VOCAB)[kind].to(dtype)
    order = torch.sort(row.float(), descending=True, stable=True).indices
    for sampling in ({"top_p": 0.4}, {"top_k": 900, "top_p": 0.7}):
        params = SamplingParams(**sampling)

        def logprobs(tokens: Tensor, params: SamplingParams = params) -> Tensor:
            return token_logprobs(placed(row, tokens.device).expand(len(tokens), -1), tokens, params=params)[0]

        with use_backend("cpu"):
            first, end = 0, row.numel()  # bisects to the first dropped token
            while first < end:
                middle = (first + end) // 2
                is_finite = logprobs(order[middle : middle + 1]).isfinite().item()
                first, end = (middle + 1, end) if is_finite else (first, middle)
            assert 0 < first < row.numel()
            samples = order[max(first - 3, 0) : first + 3]
            expected = logprobs(samples).tolist()
        assert logprobs(samples.to(device)).tolist() == expected, sampling
