"""token_logprobs against float64: log-probabilities, ranks with ties, the likeliest tokens, and rows of any kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedtree import RequestOptions, SamplingParams, token_logprobs

INF = float("inf")


def random_rows(count: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Multiples of 1/4, so that there are ties."""
    generator = torch.Generator().manual_seed(seed + vocab)
    return ((torch.randn(count, vocab, generator=generator) * 8).round() / 4).to(dtype)


def test_precision_of_small_probabilities(device):
    """Far from the likeliest token, and in a large vocabulary of equal ones."""
    logits = torch.full((2, 100_000), -3.0)
    logits[0, 7] = 20.0
    logits[0, 8] = -60.0
    exact = torch.log_softmax(logits.double(), 1)
    got, ranks, _, _ = token_logprobs(
        logits.to(device), torch.tensor([8, 7, 9, 9], device=device), rows=torch.tensor([0, 0, 0, 1], device=device)
    )
    wanted = exact[[0, 0, 0, 1], [8, 7, 9, 9]]
    assert torch.allclose(got.cpu().double(), wanted, rtol=1e-6, atol=1e-6)
    assert ranks.tolist() == [100_000, 1, 99_999, 100_000]


def test_many_of_the_likeliest(device):
    """top_n up to 1024, in order, lower ids first among equals."""
    logits = random_rows(2, 3001, torch.bfloat16)
    logits[1] = 0.25
    _, ranks, tokens, logprobs = token_logprobs(logits.to(device), torch.tensor([0, 3000], device=device), top_n=1024)
    order = logits.float().sort(descending=True, stable=True).indices[:, :1024]
    assert torch.equal(tokens.cpu(), order) and ranks[1] == 3001
    assert torch.allclose(logprobs.cpu(), logits.float().log_softmax(1).gather(1, order), rtol=2e-6, atol=2e-6)


def test_nothing_to_do(device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    for logits in (torch.zeros(0, 9, device=device), torch.zeros(3, 9, device=device)):
        rows = {} if len(logits) == 0 else {"rows": none}
        got = token_logprobs(logits, none, **rows, top_n=2, params=SamplingParams(presence_penalty=1.0))
        assert [tuple(t.shape) for t in got] == [(0,), (0,), (0, 2), (0, 2)]
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    got = token_logprobs(torch.zeros(0, 9, device=device), tokens, rows=tokens)
    assert (got[0] == -INF).all() and not got[1].any()


def test_refusals(device):
    logits, tokens = torch.zeros(3, 9, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    good = {"logits": logits, "tokens": tokens, "rows": tokens, "params": SamplingParams(), "top_n": 2}
    token_logprobs(**good)
    counts = torch.zeros(3, 9, dtype=torch.int32, device=device)
    for name, value, error, message in (
        ("logits", logits.int(), ValueError, "`logits` must be of dtype"),
        ("logits", [1.0], TypeError, "logits"),
        ("tokens", tokens.float(), ValueError, "`tokens` must be of dtype torch.int32 or torch.int64"),
        ("tokens", tokens[None], ValueError, "`tokens` must be of shape"),
        ("rows", tokens[:2], ValueError, r"`rows` must be of shape \[3\] .*, got \[2\]"),
        ("rows", tokens.float(), ValueError, "`rows` must be of dtype torch.int32 or torch.int64"),
        ("rows", tokens.to("meta"), ValueError, "`rows` must be on .*meta"),
        ("top_n", -1, ValueError, "`top_n` must be in 0..9, got -1"),
        ("top_n", 10, ValueError, "`top_n` must be in 0..9, got 10"),
        ("top_n", 1.0, TypeError, "top_n: expected an? int"),
        ("params", {}, TypeError, "params: expected a SamplingParams"),
        ("params", SamplingParams(top_p=torch.ones(2, device=device)), ValueError, "`top_p` must be of shape"),
        ("params", SamplingParams(presence_penalty=torch.ones(2, device=device)), ValueError,
         "`presence_penalty` must be of shape"),
        ("options", {}, TypeError, "options: expected a RequestOptions"),
        ("options", RequestOptions(output_counts=counts[:2]), ValueError, "`output_counts` must be of shape"),
        ("options", RequestOptions(allowed_mask=counts[:, :2]), ValueError, "`allowed_mask` must be of shape"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            token_logprobs(**{**good, name: value})
    with pytest.raises(ValueError, match=r"`tokens` must be of shape|`rows` must be"):
        token_logprobs(logits, tokens[:2])  # without rows there is an entry for each row
    wide = torch.zeros(1, 2000, device=device)
    with pytest.raises(ValueError, match=r"`top_n` must be in 0\.\.1024, got 1025"):
        token_logprobs(wide, tokens[:1], top_n=1025)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_thresholds_among_close_logits(device: torch.device, dtype: torch.dtype) -> None:
    """A filter keeps just the k largest, also where many logits share the first digits of their order."""
    generator = torch.Generator().manual_seed(3)
    for vocab in (7, 100, 3000):
        rows = (torch.randn(6, vocab, generator=generator) * 3).to(device, dtype)
        rows[::2] = rows[::2] / 64 + 5
        k = torch.arange(1, 7, dtype=torch.int32, device=device)
        kept = token_logprobs(rows, rows.argmax(1), params=SamplingParams(top_k=k), top_n=7)[3] > -torch.inf
        kth = rows.sort(descending=True).values.gather(1, k[:, None].long() - 1)
        assert kept.sum(1).tolist() == (rows >= kth).sum(1).clamp(max=7).tolist()


def test_a_threshold_among_more_logits_than_are_sorted(device: torch.device) -> None:
    """Where the k largest are too many to be sorted, those that share the threshold's first digits are found again, and
    among them are some that are too small to count."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(8, 131072, generator=generator).to(device) * 0.15 + 5
    k = torch.arange(270, 430, 20, dtype=torch.int32, device=device)
    kept = token_logprobs(rows, rows.argmax(1), params=SamplingParams(top_k=k), top_n=512)[3] > -torch.inf
    kth = rows.sort(descending=True).values.gather(1, k[:, None].long() - 1)
    assert kept.sum(1).tolist() == (rows >= kth).sum(1).tolist()
