"""token_logprobs equals float64."""

from __future__ import annotations

import pytest
import torch

from pagedtree import SamplingParams, token_logprobs


def test_many_of_the_likeliest(device):
    """top_n reaches 1024; ties order by id."""
    generator = torch.Generator().manual_seed(3001)
    logits = ((torch.randn(2, 3001, generator=generator) * 8).round() / 4).bfloat16()  # with ties
    logits[1] = 0.25
    _, ranks, tokens, logprobs = token_logprobs(logits.to(device), torch.tensor([0, 3000], device=device), top_n=1024)
    order = logits.float().sort(descending=True, stable=True).indices[:, :1024]
    assert torch.equal(tokens.cpu(), order) and ranks[1] == 3001
    assert torch.allclose(logprobs.cpu(), logits.float().log_softmax(1).gather(1, order), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_thresholds_among_close_logits(device: torch.device, dtype: torch.dtype) -> None:
    """A filter keeps just the k largest of many with equal leading digits."""
    generator = torch.Generator().manual_seed(3)
    for vocab in (7, 100, 3000):
        rows = (torch.randn(6, vocab, generator=generator) * 3).to(device, dtype)
        rows[::2] = rows[::2] / 64 + 5
        k = torch.arange(1, 7, dtype=torch.int32, device=device)
        mask = token_logprobs(rows, rows.argmax(1), params=SamplingParams(top_k=k), top_n=7)[3] > -torch.inf
        kth = rows.sort(descending=True).values.gather(1, k[:, None].long() - 1)
        assert mask.sum(1).tolist() == (rows >= kth).sum(1).clamp(max=7).tolist()
        flat = SamplingParams(temperature=1e30, min_p=1.0)  # distances round to 0
        probs = token_logprobs(rows * 1e-30, rows.argmax(1), params=flat)[0].exp()
        assert torch.allclose(probs, torch.full_like(probs, 1 / vocab))


def test_a_threshold_among_more_logits_than_are_sorted(device: torch.device) -> None:
    """Beyond the sorting limit a second pass finds logits with the threshold's leading digits, some too small."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(3, 131072, generator=generator).to(device) * 0.15 + 5
    k = torch.arange(270, 430, 60, dtype=torch.int32, device=device)
    mask = token_logprobs(rows, rows.argmax(1), params=SamplingParams(top_k=k), top_n=512)[3] > -torch.inf
    kth = rows.sort(descending=True).values.gather(1, k[:, None].long() - 1)
    assert mask.sum(1).tolist() == (rows >= kth).sum(1).tolist()
