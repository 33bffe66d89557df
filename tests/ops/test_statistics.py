"""A million draws reveal small errors of sample; the core suite's ten thousands, some percent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.exact import LIMIT, excess
from torch import Tensor

from pagedtree import SamplingParams, reference, sample

pytestmark = pytest.mark.stats

COUNT = 1_000_000
SAMPLINGS = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1, "temperature": 1.5},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.02, "filter_order": "joint"},
]


@pytest.fixture(autouse=True)
def _fast_backend(backend):
    if backend == "simt":
        pytest.skip("emulated: it gives the bits of cuda and cpu, but not a million draws in a reasonable time")


def row_of(vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5).to(dtype)


def exact(row: Tensor, **sampling) -> np.ndarray:
    return reference.distribution(reference.clean_logits(row), **sampling)


def drawn(row: Tensor, device: torch.device, count: int = COUNT, first: int = 0, **sampling) -> Tensor:
    """Draws at `count` consecutive positions of one seed."""
    seeds, positions = torch.full((count,), 99, device=device), torch.arange(first, first + count, device=device)
    params = SamplingParams(**sampling)
    return sample(row.to(device).expand(count, -1), params, seeds=seeds, positions=positions).cpu()


def draw(row: Tensor, device: torch.device, **draws) -> np.ndarray:
    return np.bincount(drawn(row, device, **draws).numpy(), minlength=row.numel())


ROWS = {
    "3 of bfloat16": row_of(3, torch.bfloat16),
    **{str(vocab): row_of(vocab) for vocab in (3, 17, 130)},
    # Longer than the blocks that scans skip: most, none, and ties at thresholds.
    "peaked": torch.cat([row_of(4000) - 9, torch.arange(40) * -0.25, row_of(4001) - 9]),
    "flat": torch.zeros(3001),
    "tied": (row_of(2100) * 2).round() / 2,
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sample(device, row, sampling):
    assert excess(draw(ROWS[row], device, **sampling), exact(ROWS[row], **sampling)) < LIMIT


def test_sample_far_tail(device):
    """A hundred thousand tokens of 1.5e-8 need the noise's far end, a word in 2^26."""
    row = torch.full((100_001,), -18.0)
    row[0] = 0.0
    counts = sum(draw(row, device, count=4000, first=4000 * i) for i in range(15))
    assert excess(np.array([counts[0], counts[1:].sum()]), grouped_tail()) < LIMIT


def grouped_tail() -> np.ndarray:
    far = 100_000 * math.exp(-18.0)
    return np.array([1.0, far]) / (1.0 + far)


def test_tokens_draw_independently(device):
    """One pair's winner says nothing about others', in its noise group or not."""
    cells, chance = torch.zeros(COUNT, dtype=torch.int64), np.ones(1)
    for tokens in ((0, 1), (2, 7), (5, 12), (9, 14)):
        row = torch.full((16,), -math.inf)
        row[[*tokens]] = torch.tensor([1.0, 0.0])
        cells = 2 * cells + (drawn(row, device) == tokens[0])
        p = 1 / (1 + math.exp(-1))
        chance = np.outer(chance, [1 - p, p]).reshape(-1)
    assert excess(np.bincount(cells.numpy(), minlength=chance.size), chance) < LIMIT


# Errors to find -------------------------------------------------------------------------------------------------------
