"""Verification with request options equals verification of processed logits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.batches import WEIGHED, batch_of, check_verdict

from pagedtree import RequestOptions, SamplingParams, reference, sample, verify_rejection, verify_sampled

INF = float("inf")


# By hand --------------------------------------------------------------------------------------------------------------


def greedy(row: list[float], device: torch.device, penalties: dict | None = None, **given) -> int:
    """Returns one row's token, which a tree's root must yield too."""
    logits = torch.tensor([row], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    at = {"seeds": zero, "positions": zero + given.pop("position", 0)}
    options = RequestOptions.from_lists(len(row), **given, device=device) if given else None
    params = SamplingParams(temperature=0.0, **(penalties or {}))
    token = int(sample(logits, params, **at, options=options))
    assert verify_sampled(logits, zero, batch_of([[-1]], device), params, **at, options=options).tokens[0, 0] == token
    return token


def test_arithmetic_by_hand(device):
    said = {"outputs": [[1, 1, 1]]}
    # Repetition divides positive logits, multiplies negative ones, and counts prompts too.
    assert greedy([1.9, 4.0], device, {"repetition_penalty": 2.0}, **said) == 1
    assert greedy([2.1, 4.0], device, {"repetition_penalty": 2.0}, **said) == 0
    assert greedy([-5.9, -3.0], device, {"repetition_penalty": 2.0}, prompts=[[1]]) == 0
    assert greedy([-6.1, -3.0], device, {"repetition_penalty": 2.0}, prompts=[[1]]) == 1
    # Presence and frequency count only output.
    assert greedy([3.9, 4.0], device, {"presence_penalty": 2.0, "frequency_penalty": 1.0}, prompts=[[1]]) == 1
    assert greedy([2.1, 4.0], device, {"presence_penalty": 2.0}, **said) == 0
    assert greedy([1.9, 4.0], device, {"presence_penalty": 2.0}, **said) == 1
    assert greedy([1.1, 4.0], device, {"frequency_penalty": 1.0}, **said) == 0
    assert greedy([0.9, 4.0], device, {"frequency_penalty": 1.0}, **said) == 1
    # Bias comes first: (3 + 4) / 2, not 3 / 2 + 4; -1 + 3 is positive.
    assert greedy([3.6, 3.0], device, {"repetition_penalty": 2.0}, bias=[{1: 4.0}], **said) == 0
    assert greedy([3.4, 3.0], device, {"repetition_penalty": 2.0}, bias=[{1: 4.0}], **said) == 1
    assert greedy([0.9, -1.0], device, {"repetition_penalty": 2.0}, bias=[{1: 3.0}], **said) == 1
    # Then repetition: 8 / 2 - 1 - 3, not (8 - 4) / 2.
    everything = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    assert greedy([0.1, 8.0], device, everything, **said) == 0
    assert greedy([-0.1, 8.0], device, everything, **said) == 1
    # -inf stays, and +inf overrides no mask.
    assert greedy([0.0, 9.0], device, bias=[{1: -INF}]) == 0
    assert greedy([0.0, -9.0], device, bias=[{1: INF}]) == 1
    assert greedy([0.0, -INF], device, bias=[{1: INF}]) == 0
    assert greedy([0.0, 9.0], device, allowed=[[0]], bias=[{1: INF}]) == 0
    assert greedy([0.0, 9.0], device, bad_words=[[[1]]], bias=[{1: INF}]) == 0


def test_rounding_is_that_of_torch(device):
    """Product and difference round separately, as in `logits - frequency * counts`, so these tie."""
    generator = torch.Generator().manual_seed(0)
    count = 2000
    logits, frequency = torch.randn(count, generator=generator) * 5, torch.rand(count, generator=generator) * 4 - 2
    times = torch.randint(1, 40, (count,), generator=generator)
    result = logits - frequency * times
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    for flip in (False, True):
        rows, counts = torch.stack([result, logits], 1), torch.stack([torch.zeros_like(times), times], 1).int()
        if flip:
            rows, counts = rows.flip(1), counts.flip(1)
        options = RequestOptions(output_counts=counts.contiguous().to(device))
        params = SamplingParams(temperature=0.0, frequency_penalty=frequency.to(device))
        assert not sample(rows.to(device), params, seeds=zeros, positions=zeros, options=options).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overflow_is_the_largest_number(device, temperature):
    """Penalty or bias may overflow float32."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    for row, penalties, lists in (
        ([1.0, 2.0, 3e38, 3.0], {"repetition_penalty": 0.5}, {"outputs": [[2]]}),
        ([1.0, 2.0, 3e38, 3.0], {}, {"bias": [{2: 3e38}]}),
        ([1.0, 2.0, 3.0, 3.0], {"repetition_penalty": 0.7}, {"outputs": [[2]], "bias": [{2: INF}]}),
        ([-3e38, -2e38, -1e38, -INF], {"repetition_penalty": 2.0}, {"outputs": [[0, 1]]}),
    ):
        params = SamplingParams(temperature=temperature, **penalties)
        logits = torch.tensor([row], device=device)
        at = {"seeds": zero, "positions": zero}
        at["options"] = RequestOptions.from_lists(4, **lists, device=device)
        assert sample(logits, params, **at).tolist() == [2]
        for verdict in (
            verify_sampled(logits, zero, batch_of([[-1]], device), params, **at),
            verify_rejection(logits, zero, batch_of([[-1]], device), params, draft_law="onehot", **at),
        ):
            check_verdict(verdict, 0, [0], [2])


@pytest.mark.parametrize("top_k", [3, 50])
def test_filters_where_penalties_take_the_likeliest(device, top_k):
    """Most large logits fall far below their bounds; likely tokens are in unlikely places."""
    vocab, count = 9000, 96
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(1, vocab, generator=generator) * 0.1
    likely, second = torch.randperm(vocab - 3000, generator=generator)[:300].split([200, 100])
    logits[0, likely] += 3 + torch.arange(200) * 0.001
    logits[0, second] += 2
    logits[0, -3000:] = -50
    said = torch.cat([likely[40:], second]).tolist()
    every = {"bias": [{vocab - 5: 55.5, vocab - 2500: 55.4}] * count, "outputs": [said] * count}
    options = RequestOptions.from_lists(vocab, **every, device=device)
    one = RequestOptions.from_lists(vocab, outputs=[said], bias=every["bias"][:1])
    plain = {"temperature": 2.0, "top_k": top_k}
    params = SamplingParams(**plain, presence_penalty=2.0)
    row = reference.apply_options(logits, params, one)
    at = {
        "seeds": torch.arange(count, device=device),
        "positions": torch.zeros(count, dtype=torch.int64, device=device),
    }
    tokens = sample(logits.to(device).expand(count, -1), params, **at, options=options)
    assert torch.equal(tokens, sample(row.to(device).expand(count, -1), SamplingParams(**plain), **at))
    assert {vocab - 5, vocab - 2500} <= set(tokens.tolist())
    assert top_k == 3 or len(tokens.unique()) > 20


def test_deep_paths(device):
    """A chain of 299 equal drafts, each counted, ends at the exact node."""
    count, turn = 300, 250
    logits = torch.full((count, 5), -20.0, device=device)
    logits[:, 2], logits[:, 3] = 60.0, 60.0 - (turn - 0.5) / 64
    drafts = torch.full((count,), 2, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    chain, path = batch_of([list(range(-1, count - 1))], device), list(range(turn + 1))
    params = SamplingParams(temperature=0.0, frequency_penalty=1 / 64)
    for op, law in [(verify_sampled, None), *WEIGHED]:
        keywords = {} if law is None else {"draft_law": law}
        if law in ("iid", "swor"):
            keywords["draft_probs"] = torch.full((count, 5), 0.2, device=device)
        verdict = op(logits, drafts, chain, params, seeds=zero, positions=zero, **keywords)
        check_verdict(verdict, 0, path, [2] * turn + [3])


def resident(which: str) -> int:
    """Returns bytes: VmRSS now, VmHWM the peak since a reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{which}:")[1].split()[0]) * 1024


def test_no_memory_of_the_size_of_the_logits(backend, device):
    """Float32 logits would be 4 GB; only the roots' rows are read."""
    reset = Path("/proc/self/clear_refs")
    if backend == "cuda" or not reset.exists() or "LD_PRELOAD" in os.environ:
        pytest.skip("counts the memory of a process on Linux, without a sanitizer's own")
    vocab, batch, nodes = (2**18, 4, 1000) if backend == "cpu" else (2**14, 4, 1000)
    trees = batch_of([[-1] + [0] * (nodes - 1)] * batch, device)
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(0)).half()
    logits, drafts = row.expand(batch * nodes, vocab), torch.arange(batch * nodes) % 50
    options = RequestOptions(
        prompt_mask=torch.zeros(1, -(-vocab // 32), dtype=torch.int32).expand(batch, -1),
        output_counts=torch.zeros(1, vocab, dtype=torch.int32).expand(batch, -1),
        allowed_mask=torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32).expand(batch, -1),
    )
    at = {"seeds": torch.arange(batch), "positions": torch.arange(batch), "options": options}
    params = SamplingParams(top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5)

    def both() -> None:
        verify_sampled(logits, drafts, trees, params, **at)
        verify_rejection(logits, drafts, trees, params, draft_law="onehot", **at)

    both()
    reset.write_text("5")
    before = resident("VmRSS")
    both()
    assert resident("VmHWM") - before < batch * nodes * vocab  # a quarter of float32 logits
