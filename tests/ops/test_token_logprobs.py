"""token_logprobs against float64: log-probabilities, ranks with ties, the likeliest tokens, and rows of any kind."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from options_case import PARTS, Case, changed, make_case, strided
from sampling_case import HALF_TYPES, SAMPLINGS
from torch import Tensor

from pagedtree import RequestOptions, SamplingParams, reference, token_logprobs

INF = float("inf")


def log_distributions(row: np.ndarray, sampling: dict | None) -> list[np.ndarray]:
    """The natural logarithms of one row's distribution; a few where a top_p boundary may fall either way."""
    sampling = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "filter_order": "top_k_first",
        **(sampling or {}),
    }
    if row.max() == -INF or sampling["temperature"] == 0:
        with np.errstate(divide="ignore"):
            return [np.log(reference.distribution(row, **sampling))]
    found = []
    for shift in (0.0, -1e-4, 1e-4):
        top_p = min(max(sampling["top_p"] + shift, 1e-9), 1.0) if sampling["top_p"] < 1 else 1.0
        kept = reference.kept_tokens(row, **{**sampling, "top_p": top_p})
        scores = np.where(kept, (row - row.max()) / sampling["temperature"], -INF)
        with np.errstate(over="ignore"):
            found.append((scores - np.log(np.exp(scores).sum())).astype(np.float32))
    return found


def check(got: tuple[Tensor, ...], rows: Tensor, tokens: list[int], samplings: list[dict | None], top_n: int) -> None:
    """`rows` are the logits of each entry, with options; None where there is no such row."""
    logprobs, ranks, top_tokens, top_logprobs = got
    assert logprobs.dtype == top_logprobs.dtype == torch.float32 and ranks.dtype == top_tokens.dtype == torch.int64
    assert logprobs.shape == ranks.shape == (len(tokens),)
    assert top_tokens.shape == top_logprobs.shape == (len(tokens), top_n)
    for r, (row, token, sampling) in enumerate(zip(rows, tokens, samplings, strict=True)):
        clean = None if row is None else reference.clean_logits(row)
        if clean is None:
            assert logprobs[r] == -INF and ranks[r] == 0 and (top_tokens[r] == -1).all()
            assert (top_logprobs[r] == -INF).all()
            continue
        # Where nothing is left the row is uniform, and all tokens are alike.
        best = [int(x) for x in np.argsort(-clean, kind="stable") if clean[x] > -INF or clean.max() == -INF][:top_n]
        assert top_tokens[r].tolist() == best + [-1] * (top_n - len(best)), r
        is_token = 0 <= token < len(clean)
        assert ranks[r] == (np.sum(clean >= clean[token]) if is_token else 0), r
        places = [*best, token] if is_token else best
        mine = [*top_logprobs[r, : len(best)].tolist(), *([float(logprobs[r])] if is_token else [])]
        assert any(
            np.allclose(mine, law[places], rtol=2e-6, atol=2e-6) for law in log_distributions(clean, sampling)
        ), r
        assert is_token or logprobs[r] == -INF
        assert (top_logprobs[r, len(best) :] == -INF).all()


def random_rows(count: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Multiples of 1/4, so that there are ties."""
    generator = torch.Generator().manual_seed(seed + vocab)
    return ((torch.randn(count, vocab, generator=generator) * 8).round() / 4).to(dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize(
    "vocab", [1, 31, 1000, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4099, 70_001))]
)
def test_raw(device, vocab, dtype):
    logits = random_rows(7, vocab, dtype)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, vocab, (9,), generator=generator)
    tokens[3], tokens[4] = vocab, -1
    rows = torch.tensor([0, 1, 2, 3, 4, 6, 6, 5, 0])
    for top_n in sorted({0, 1, min(vocab, 6), min(vocab, 40)}):
        for kind in (torch.int32, torch.int64):
            got = token_logprobs(
                logits.to(device), tokens.to(kind).to(device), rows=rows.to(kind).to(device), top_n=top_n
            )
            check([t.cpu() for t in got], [logits[r] for r in rows], tokens.tolist(), [None] * 9, top_n)
    got = token_logprobs(logits.to(device), tokens[:7].to(device), top_n=1)
    check([t.cpu() for t in got], list(logits), tokens[:7].tolist(), [None] * 7, 1)
    again = token_logprobs(strided(logits.to(device)), tokens[:7].to(device), top_n=1)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("vocab", [1, 33, 1025, pytest.param(5000, marks=pytest.mark.slow)])
def test_filtered(device, vocab):
    """Scalars for all rows, and tensors with a value for each."""
    logits = random_rows(len(SAMPLINGS), vocab, HALF_TYPES[vocab % 3])
    tokens = logits.float().topk(min(vocab, 4)).indices[:, -1].contiguous()
    top_n = min(vocab, 5)
    for sampling in SAMPLINGS:
        got = token_logprobs(logits.to(device), tokens.to(device), params=SamplingParams(**sampling), top_n=top_n)
        check([t.cpu() for t in got], list(logits), tokens.tolist(), [sampling] * len(SAMPLINGS), top_n)
    for order in ("top_k_first", "joint"):
        columns = {
            name: torch.tensor([s.get(name, neutral) for s in SAMPLINGS], device=device)
            for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        }
        params = SamplingParams(**columns, filter_order=order)
        got = token_logprobs(logits.to(device), tokens.to(device), params=params, top_n=top_n)
        each = [{**s, "filter_order": order} for s in SAMPLINGS]
        check([t.cpu() for t in got], list(logits), tokens.tolist(), each, top_n)


def of_rows(case: Case, count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, len(case.logits), (count,), generator=generator)
    tokens = case.drafts[torch.randint(0, len(case.logits), (count,), generator=generator).to(case.drafts.device)]
    return rows.to(case.logits.device), tokens, case.logits[rows.to(case.logits.device)]


@pytest.mark.parametrize("vocab", [5, 1003, pytest.param(4500, marks=pytest.mark.slow)])
def test_options(device, vocab):
    """Entry r has the options of request r; there is no position, so stop ids do not apply."""
    for seed in range(3):
        case = changed(make_case(vocab, PARTS, seed=seed, dtype=HALF_TYPES[seed]), lambda t: t.to(device))
        rows, tokens, logits = of_rows(case, len(case.seeds))
        applied = reference.apply_options(logits, case.params, case.options).cpu()
        for sampling in (None, {}, {"temperature": 0.7, "top_k": 3}, {"temperature": 0.0}):
            params = None if sampling is None else replace(SamplingParams(**sampling), **case.penalties)
            wanted = applied
            if params is None:  # without parameters there are no penalties
                wanted = reference.apply_options(logits, SamplingParams(), case.options).cpu()
            got = token_logprobs(case.logits, tokens, rows=rows, params=params, options=case.options, top_n=4)
            check([t.cpu() for t in got], list(wanted), tokens.tolist(), [sampling] * len(rows), 4)
    penalised = token_logprobs(case.logits, tokens, rows=rows, params=case.params)
    wanted = reference.apply_options(logits, case.params, None).cpu()
    check([t.cpu() for t in penalised], list(wanted), tokens.tolist(), [{}] * len(rows), 0)


def test_rows_out_of_range(device):
    logits = random_rows(3, 20, torch.float32)
    tokens = torch.tensor([1, 2, 3, 4, 5, 25], device=device)
    given = [-1, 3, 0, -(2**31), 2**31 - 1, 2]
    for far in (0, 2**40, -(2**62)):
        rows = torch.tensor(given, device=device)
        rows[1] = far or 3
        wanted = [logits[r] if 0 <= r < 3 else None for r in rows.tolist()]
        got = token_logprobs(logits.to(device), tokens, rows=rows, top_n=2)
        check([t.cpu() for t in got], wanted, tokens.tolist(), [None] * 6, 2)
        params = SamplingParams(top_k=3, presence_penalty=1.0)
        got = token_logprobs(logits.to(device), tokens, rows=rows, top_n=2, params=params)
        check([t.cpu() for t in got], wanted, tokens.tolist(), [{"top_k": 3}] * 6, 2)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_rows_that_are_not_finite(device, dtype):
    nan = math.nan
    logits = torch.tensor(
        [
            [nan] * 5,
            [-INF] * 5,
            [0.0, nan, 1.0, -INF, 1.0],
            [-INF, 2.0, -INF, -INF, nan],
            [INF, 1.0, INF, 2.0, -INF],
            [0.0, -0.0, 0.0, -1.0, -0.0],
        ],
        dtype=dtype,
    )
    for token in range(5):
        tokens = torch.full((6,), token, device=device)
        got = token_logprobs(logits.to(device), tokens, top_n=5)
        check([t.cpu() for t in got], list(logits), [token] * 6, [None] * 6, 5)
        for sampling in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.5, "top_p": 0.5}):
            got = token_logprobs(logits.to(device), tokens, params=SamplingParams(**sampling), top_n=5)
            check([t.cpu() for t in got], list(logits), [token] * 6, [sampling] * 6, 5)


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
    got = token_logprobs(logits.to(device), torch.tensor([0, 3000], device=device), top_n=1024)
    check([t.cpu() for t in got], list(logits), [0, 3000], [None] * 2, 1024)
    assert got[2][1].tolist() == list(range(1024))


def test_entries_do_not_depend_on_others(device):
    logits = random_rows(9, 2500, torch.float16).to(device)
    tokens = torch.arange(9, device=device) * 270
    params = SamplingParams(temperature=torch.linspace(0.0, 2.0, 9, device=device), top_p=0.8)
    together = token_logprobs(logits, tokens, params=params, top_n=3)
    for r in range(9):
        one = replace(params, temperature=params.temperature[r : r + 1])
        alone = token_logprobs(logits[r : r + 1], tokens[r : r + 1], params=one, top_n=3)
        assert all(torch.equal(a[r : r + 1], b) for a, b in zip(together, alone, strict=True))


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
