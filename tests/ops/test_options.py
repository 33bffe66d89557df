"""Request options inside verification: an op with options gives what it gives without for logits that have them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import mapped
from device_case import placed
from options_case import (
    CHAINS,
    OF_CHAINS,
    PARTS,
    TREES,
    WEIGHED,
    Case,
    batch_of,
    differences,
    make_case,
    strided,
)
from verify_case import check

from pagedtree import RequestOptions, SamplingParams, reference, sample, verify_rejection, verify_sampled
from pagedtree.check.cases.inputs import as_words

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GREEDY = SamplingParams(temperature=0.0)
INF = float("inf")


def case_of(vocab: int, parts: Iterable[str], parents: list[list[int]], seed: int) -> Case:
    """With NaN and infinities, a packed grammar, drafts of another vocabulary and strided rows, each in half of all."""
    case = make_case(vocab, parts, seed=seed, parents=parents, dtype=DTYPES[seed % 3])
    generator = torch.Generator().manual_seed(seed)
    if seed & 1:
        for row in case.logits:
            strange = torch.tensor([float("nan"), INF, -INF])[torch.randint(3, (2,), generator=generator)]
            row[torch.randint(vocab, (2,), generator=generator)] = strange.to(row.dtype)
    if seed & 2 and case.grammar_mask is not None:
        case = replace(case, grammar_mask=as_words(case.grammar_mask))
    if seed & 4:  # path tokens count as the target's ids
        to_target = torch.randperm(vocab, generator=generator)
        ids = torch.where(case.drafts < 0, -1, to_target.argsort()[case.drafts])
        case = replace(case, drafts=ids, draft_to_target=to_target)
    return mapped(case, strided) if seed & 8 else case


@pytest.mark.parametrize("vocab", [1, 5, 64, 333, pytest.param(5003, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *range(11, 14), *(pytest.param(s, marks=pytest.mark.slow) for s in range(14, 40))])
@pytest.mark.parametrize("parents", [TREES, CHAINS], ids=["trees", "chains"])
def test_random_options(device, vocab, seed, parents):
    generator = torch.Generator().manual_seed(seed)
    parts = [part for part in PARTS if seed == 0 or torch.rand((), generator=generator) < 0.5]
    assert differences(mapped(case_of(vocab, parts, parents, seed), lambda t: placed(t, device))) == []


# By hand --------------------------------------------------------------------------------------------------------------


def greedy(row: list[float], device: torch.device, penalties: dict | None = None, **given) -> int:
    """The token that one row gives, which the root of a tree must give, too."""
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
    # Positive logits are divided, negative ones multiplied; prompt and output count alike.
    assert greedy([1.9, 4.0], device, {"repetition_penalty": 2.0}, **said) == 1
    assert greedy([2.1, 4.0], device, {"repetition_penalty": 2.0}, **said) == 0
    assert greedy([-5.9, -3.0], device, {"repetition_penalty": 2.0}, prompts=[[1]]) == 0
    assert greedy([-6.1, -3.0], device, {"repetition_penalty": 2.0}, prompts=[[1]]) == 1
    # Only the output counts for the others.
    assert greedy([3.9, 4.0], device, {"presence_penalty": 2.0, "frequency_penalty": 1.0}, prompts=[[1]]) == 1
    assert greedy([2.1, 4.0], device, {"presence_penalty": 2.0}, **said) == 0
    assert greedy([1.9, 4.0], device, {"presence_penalty": 2.0}, **said) == 1
    assert greedy([1.1, 4.0], device, {"frequency_penalty": 1.0}, **said) == 0
    assert greedy([0.9, 4.0], device, {"frequency_penalty": 1.0}, **said) == 1
    # Bias comes before penalties: (3 + 4) / 2 and not 3 / 2 + 4; -1 + 3 is positive and not negative.
    assert greedy([3.6, 3.0], device, {"repetition_penalty": 2.0}, bias=[{1: 4.0}], **said) == 0
    assert greedy([3.4, 3.0], device, {"repetition_penalty": 2.0}, bias=[{1: 4.0}], **said) == 1
    assert greedy([0.9, -1.0], device, {"repetition_penalty": 2.0}, bias=[{1: 3.0}], **said) == 1
    # Repetition before presence and frequency: 8 / 2 - 1 - 3 and not (8 - 4) / 2.
    everything = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    assert greedy([0.1, 8.0], device, everything, **said) == 0
    assert greedy([-0.1, 8.0], device, everything, **said) == 1
    # -inf stays so, +inf does not pass what forbids.
    assert greedy([0.0, 9.0], device, bias=[{1: -INF}]) == 0
    assert greedy([0.0, -9.0], device, bias=[{1: INF}]) == 1
    assert greedy([0.0, -INF], device, bias=[{1: INF}]) == 0
    assert greedy([0.0, 9.0], device, allowed=[[0]], bias=[{1: INF}]) == 0
    assert greedy([0.0, 9.0], device, bad_words=[[[1]]], bias=[{1: INF}]) == 0


def test_rounding_is_that_of_torch(device):
    """A product and a difference are two operations, as in `logits - frequency * counts`: the same value is a tie."""
    generator = torch.Generator().manual_seed(0)
    count = 2000
    logits, frequency = torch.randn(count, generator=generator) * 5, torch.rand(count, generator=generator) * 4 - 2
    times = torch.randint(1, 40, (count,), generator=generator)
    same = logits - frequency * times
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    for flip in (False, True):
        rows, counts = torch.stack([same, logits], 1), torch.stack([torch.zeros_like(times), times], 1).int()
        if flip:
            rows, counts = rows.flip(1), counts.flip(1)
        options = RequestOptions(output_counts=counts.contiguous().to(device))
        params = SamplingParams(temperature=0.0, frequency_penalty=frequency.to(device))
        assert not sample(rows.to(device), params, seeds=zeros, positions=zeros, options=options).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overflow_is_the_largest_number(device, temperature):
    """A penalty or a bias may drive a logit beyond float32."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    for row, penalties, given in (
        ([1.0, 2.0, 3e38, 3.0], {"repetition_penalty": 0.5}, {"outputs": [[2]]}),
        ([1.0, 2.0, 3e38, 3.0], {}, {"bias": [{2: 3e38}]}),
        ([1.0, 2.0, 3.0, 3.0], {"repetition_penalty": 0.7}, {"outputs": [[2]], "bias": [{2: INF}]}),
        ([-3e38, -2e38, -1e38, -INF], {"repetition_penalty": 2.0}, {"outputs": [[0, 1]]}),
    ):
        params = SamplingParams(temperature=temperature, **penalties)
        logits = torch.tensor([row], device=device)
        at = {"seeds": zero, "positions": zero}
        at["options"] = RequestOptions.from_lists(4, **given, device=device)
        assert sample(logits, params, **at).tolist() == [2]
        for verdict in (
            verify_sampled(logits, zero, batch_of([[-1]], device), params, **at),
            verify_rejection(logits, zero, batch_of([[-1]], device), params, draft_law="onehot", **at),
        ):
            check(verdict, 0, [0], [2])


@pytest.mark.parametrize("top_k", [3, 50])
def test_filters_where_penalties_take_the_likeliest(device, top_k):
    """Most of the largest logits are far below their bounds, and the likeliest tokens are in unlikely places."""
    vocab, count = 9000, 96
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(1, vocab, generator=generator) * 0.1
    likely, second = torch.randperm(vocab - 3000, generator=generator)[:300].split([200, 100])
    logits[0, likely] += 3 + torch.arange(200) * 0.001
    logits[0, second] += 2
    logits[0, -3000:] = -50
    said = torch.cat([likely[40:], second]).tolist()
    every = {"bias": [{vocab - 5: 53.5, vocab - 2500: 53.4}] * count, "outputs": [said] * count}
    options = RequestOptions.from_lists(vocab, **every, device=device)
    one = RequestOptions.from_lists(vocab, outputs=[said], bias=every["bias"][:1])
    plain = {"temperature": 2.0, "top_k": top_k}
    params = SamplingParams(**plain, presence_penalty=2.0)
    row = reference.apply_options(logits, params, one)
    at = {
        "seeds": torch.arange(count, device=device),
        "positions": torch.zeros(count, dtype=torch.int64, device=device),
    }
    drawn = sample(logits.to(device).expand(count, -1), params, **at, options=options)
    assert torch.equal(drawn, sample(row.to(device).expand(count, -1), SamplingParams(**plain), **at))
    assert {vocab - 5, vocab - 2500} <= set(drawn.tolist())
    assert top_k == 3 or len(drawn.unique()) > 20


def test_deep_paths(device):
    """A chain of 1023 drafts of one token, and as many counts on top: where the path ends is exact."""
    count, turn = 1024, 700
    logits = torch.full((count, 5), -20.0, device=device)
    logits[:, 2], logits[:, 3] = 60.0, 60.0 - (turn - 0.5) / 64
    drafts = torch.full((count,), 2, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    chain, path = batch_of([list(range(-1, count - 1))], device, count), list(range(turn + 1))
    params = SamplingParams(temperature=0.0, frequency_penalty=1 / 64)
    for op, law in [(verify_sampled, None), *OF_CHAINS, *WEIGHED]:
        keywords = {} if law is None else {"draft_law": law}
        if law in ("iid", "swor"):
            keywords["draft_probs"] = torch.full((count, 5), 0.2, device=device)
        verdict = op(logits, drafts, chain, params, seeds=zero, positions=zero, **keywords)
        check(verdict, 0, path, [2] * turn + [3])


def word_row(device: torch.device, text: list[int], words: list[list[int]], start: int | None = None, **given) -> int:
    """Returns what is left of tokens 0 and 1, of which 1 is better, after the text; without one of them, token 2."""
    options = RequestOptions.from_lists(9, prompts=[text], outputs=[[]], bad_words=[words], device=device)
    if start is not None:
        options = replace(options, history_start=torch.tensor([start], dtype=torch.int32, device=device))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    logits = torch.tensor([[1.0, 2.0, *[0.0] * 7]], device=device)
    return int(sample(logits, GREEDY, seeds=zero, positions=zero, options=options))


def test_bad_words_by_hand(device):
    assert word_row(device, [5, 6], [[1]]) == 0
    assert word_row(device, [5, 6], [[6, 1]]) == 0
    assert word_row(device, [5, 6], [[5, 6, 1]]) == 0
    assert word_row(device, [5, 6], [[5, 6, 1], [0]]) == 2
    assert word_row(device, [5, 6], [[5, 1]]) == 1
    assert word_row(device, [5, 6], [[4, 5, 6, 1]]) == 1  # longer than the text
    assert word_row(device, [], [[6, 1]]) == 1
    assert word_row(device, [], [[1]]) == 0
    # A word that begins before history_start does not count, one of a token always does.
    assert word_row(device, [5, 6], [[5, 6, 1]], start=0) == 0
    assert word_row(device, [5, 6], [[5, 6, 1]], start=1) == 1
    assert word_row(device, [5, 6], [[6, 1]], start=1) == 0
    assert word_row(device, [5, 6], [[6, 1]], start=2) == 1
    assert word_row(device, [5, 6], [[1]], start=2) == 0


def test_minimum_length_by_hand(device):
    """Node n predicts positions[b] + depth + 1; position 10 is the first at which token 1 may come."""
    stops = {"stop_ids": [[1]], "min_positions": [10]}
    for position, token in ((7, 0), (8, 0), (9, 1), (10, 1)):
        assert greedy([1.0, 2.0], device, position=position, **stops) == token
    logits = torch.tensor([0.0, 1.0, 2.0], device=device).expand(4, 3)
    options = RequestOptions.from_lists(3, stop_ids=[[2]], min_positions=[10], device=device)
    seeds = torch.zeros(1, dtype=torch.int64, device=device)
    drafts, trees = torch.tensor([0, 1, 1, 1], device=device), batch_of([[-1, 0, 1, 2]], device)
    for position, tokens in ((6, [1, 1, 1, 2]), (7, [1, 1, 2]), (8, [1, 2]), (9, [2]), (5, [1, 1, 1, 1])):
        verdict = verify_sampled(
            logits, drafts, trees, GREEDY, seeds=seeds, positions=seeds + position, options=options
        )
        assert verdict.tokens[0, : len(tokens) + 1].tolist() == [*tokens, -1]


def test_stop_ids_stay_where_nothing_else_is_left(device):
    stops = {"stop_ids": [[1, 3]], "min_positions": [10]}
    row = [1.0, 2.0, 0.0, 3.0]
    assert greedy(row, device, **stops) == 0
    assert greedy(row, device, **stops, allowed=[[1, 2, 3]]) == 2
    assert greedy(row, device, **stops, allowed=[[1, 3]]) == 3
    assert greedy(row, device, **stops, bad_words=[[[0], [2]]]) == 3
    # What bias forbids counts, too; it comes later, but "at the end" nothing else is left.
    assert greedy(row, device, **stops, bias=[{0: -INF, 2: -INF}]) == 3
    assert greedy(row, device, **stops, bias=[{0: -INF}]) == 2
    assert greedy([-INF, 2.0, float("nan"), 3.0], device, **stops) == 3
    assert greedy([-INF, 2.0, INF, 3.0], device, **stops) == 2
    # What was forbidden otherwise stays so.
    assert greedy(row, device, **stops, allowed=[[1]]) == 1


def resident(which: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{which}:")[1].split()[0]) * 1024


def test_no_memory_of_the_size_of_the_logits(backend, device):
    """4000 rows of 2^18 tokens would be 4 GB in float32; the walk reads the roots' rows, and little more is made."""
    reset = Path("/proc/self/clear_refs")
    if backend == "cuda" or not reset.exists() or "LD_PRELOAD" in os.environ:
        pytest.skip("counts the memory of a process on Linux, without a sanitizer's own")
    vocab, batch, nodes = (2**18, 4, 1000) if backend == "cpu" else (2**14, 4, 1000)
    trees = batch_of([[-1] + [0] * (nodes - 1)] * batch, device, nodes)
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
    assert resident("VmHWM") - before < batch * nodes * vocab  # a quarter of the logits in float32
