"""Request options inside verification: an op with options gives what it gives without for logits that have them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from options_case import (
    CHAINS,
    OF_CHAINS,
    PARTS,
    TREES,
    WEIGHED,
    Case,
    alone,
    batch_of,
    calls,
    changed,
    differences,
    make_case,
    strided,
    verify,
)
from verify_case import BAD_ROW, check

from pagedtree import RequestOptions, SamplingParams, reference, sample, verify_rejection, verify_sampled
from pagedtree.check.cases.inputs import as_words

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GREEDY = SamplingParams(temperature=0.0)
INF = float("inf")


def cases(vocab: int, parts, seed: int, device: torch.device) -> list[Case]:
    """One of trees and one of chains, which have the same options but other rows."""
    made = [
        make_case(vocab, parts, seed=seed + i, parents=parents, dtype=DTYPES[(seed + i) % 3])
        for i, parents in enumerate((TREES, CHAINS))
    ]
    return [changed(case, lambda t: t.to(device)) for case in made]


@pytest.mark.parametrize(
    "parts", [*([part] for part in PARTS), ["repetition", "counts", "prompt"], ["stops", "allowed"]], ids="+".join
)
def test_each_option(device, parts):
    for case in cases(33, parts, len(parts[0]), device):
        assert differences(case) == []


@pytest.mark.parametrize(
    "vocab",
    [1, 2, 31, 1000, 4099, pytest.param(8500, marks=pytest.mark.slow), pytest.param(70_001, marks=pytest.mark.slow)],
)
def test_all_options(device, vocab):
    for case in cases(vocab, PARTS, vocab, device):
        assert differences(case) == []


@pytest.mark.parametrize("vocab", [5, 64, 333, pytest.param(5003, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_random_subsets(device, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [part for part in PARTS if torch.rand((), generator=generator) < 0.5]
    for case in cases(vocab, parts, 100 + seed, device):
        assert differences(case) == []


@pytest.mark.parametrize("vocab", [2100, pytest.param(20_011, marks=pytest.mark.slow)])
def test_instruction_sets(row_isa, vocab):
    for seed in (5,) if vocab < 9999 else (5, 6, 7):
        for case in cases(vocab, PARTS, seed, torch.device("cpu")):
            assert differences(case) == []


def test_options_matter(backend, device):
    """The cases above are worth something: each option changes what most ops give, and paths are long."""
    if backend == "simt":
        pytest.skip("of the cases, not of a backend")
    for part in PARTS:
        moved = 0
        for seed in range(2):
            for case in cases(33, [part], seed, device):
                plain = replace(case, options=None, penalties={}, grammar_mask=None)
                for name in calls(case):
                    moved += not torch.equal(verify(case, name).tokens, verify(plain, name).tokens)
        assert moved > 3, part
    found = [verify(case, name) for seed in range(2) for case in cases(33, PARTS, seed, device) for name in calls(case)]
    assert max(int(verdict.num_accepted.max()) for verdict in found) > 2
    assert sum(int(verdict.num_accepted.sum()) for verdict in found) > 40


def test_strided_rows(device):
    for case in cases(77, PARTS, 5, device):
        assert differences(changed(case, strided)) == []


def test_packed_grammar(device):
    for case in cases(77, PARTS, 6, device):
        assert differences(replace(case, grammar_mask=as_words(case.grammar_mask.cpu()).to(device))) == []


def test_draft_vocabulary(device):
    """Path tokens count as the target's ids."""
    for case in cases(45, PARTS, 7, device):
        to_target = torch.randperm(45, generator=torch.Generator().manual_seed(1))
        ids = torch.where(case.drafts.cpu() < 0, -1, to_target.argsort()[case.drafts.cpu()])
        mapped = replace(case, drafts=ids.to(device), draft_to_target=to_target.to(device))
        assert differences(mapped) == []
        for name in calls(case):
            assert all(torch.equal(a, b) for a, b in zip(verify(mapped, name), verify(case, name), strict=True))


def test_rows_with_nan_and_infinities(device):
    """NaN is told by the status, forbidden or not; infinities become what they are without options."""
    for i, case in enumerate(cases(70, PARTS, 8, device)):
        generator = torch.Generator().manual_seed(i)
        strange = torch.tensor([float("nan"), INF, -INF], device=device)
        for row in case.logits:
            places = torch.randint(0, 70, (2,), generator=generator)
            row[places.to(device)] = strange[torch.randint(0, 3, (2,), generator=generator).to(device)].to(row.dtype)
        assert differences(case) == []


def test_sequences_alone(device):
    """Bit for bit what a sequence gives in the batch, in any slot."""
    for case in cases(130, PARTS, 9, device):
        for name in calls(case):
            together = verify(case, name)
            for b in range(len(case.seeds)):
                for column, mine in zip(together, verify(alone(case, b), name), strict=True):
                    assert torch.equal(column[b : b + 1], mine), (name, b)


def test_no_sequences(device):
    trees, none = batch_of([], device), torch.zeros(0, dtype=torch.int64, device=device)
    options = RequestOptions.from_lists(
        9, prompts=[], outputs=[], allowed=[], bias=[], bad_words=[], stop_ids=[], min_positions=[], device=device
    )
    at = {"seeds": none, "positions": none, "options": options}
    logits, params = torch.zeros(0, 9, device=device), SamplingParams(presence_penalty=1.0)
    assert verify_sampled(logits, none, trees, params, **at).tokens.shape == (0, 8)
    assert verify_rejection(logits, none, trees, params, draft_law="onehot", **at).tokens.shape == (0, 8)
    assert sample(logits, params, **at).shape == (0,)


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


@pytest.mark.parametrize("vocab", [600, 5003])
def test_penalties_that_raise_logits(device, vocab):
    """A token far from the others, which is the best one by its penalty alone, or is no longer so."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    for penalties, low in (
        ({"repetition_penalty": 0.5}, 2.0), ({"repetition_penalty": 0.5}, -3.0), ({"presence_penalty": -2.0}, 2.0),
        ({"frequency_penalty": -1.0}, 1.0), ({"repetition_penalty": 0.5, "presence_penalty": 0.5}, 2.0),
    ):  # fmt: skip
        high = 3.0 if low > 0 else -2.0
        logits = torch.full((1, vocab), -9.0, device=device)
        for token, other in ((3, vocab - 2), (vocab - 2, 3), (vocab // 2, 3)):
            logits[0, token], logits[0, other] = low, high
            options = RequestOptions.from_lists(vocab, outputs=[[token] * 4], device=device)
            params = SamplingParams(temperature=0.0, **penalties)
            at = {"seeds": zero, "positions": zero, "options": options}
            assert sample(logits, params, **at).tolist() == [token]
            assert sample(logits, replace(params, temperature=1e-3), **at).tolist() == [token]
            verdict = verify_rejection(logits, zero, batch_of([[-1]], device), params, draft_law="onehot", **at)
            check(verdict, 0, [0], [token])
            lowered = SamplingParams(temperature=0.0, frequency_penalty=0.6)
            swapped = RequestOptions.from_lists(vocab, outputs=[[other] * 4], device=device)
            assert sample(logits, lowered, **{**at, "options": swapped}).tolist() == [token]
            logits.fill_(-9.0)


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


def test_temperature_comes_after_bias(device):
    """ln(9) / 2 + bias ln(3) at temperature 1/2 is odds of 81 : 1 for the other order 27 : 1."""
    count = 20_000 if device.type != "cpu" else 4000
    logits = torch.tensor([0.0, 1.0986123], device=device).expand(count, 2)
    zero = torch.zeros(count, dtype=torch.int32, device=device)
    options = RequestOptions(
        bias_tokens=zero + 1, bias_values=torch.full((count,), 1.0986123, device=device),
        cu_bias=torch.arange(count + 1, dtype=torch.int32, device=device),
    )  # fmt: skip
    tokens = sample(
        logits, SamplingParams(temperature=0.5), seeds=torch.arange(count, device=device), positions=zero.long(),
        options=options,
    )  # fmt: skip
    odds = float((tokens == 0).sum()) / count
    assert abs(odds - 1 / 82) < 0.006


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


def test_penalties_along_a_path(device):
    """Token 1 loses one point each time that it is drafted, until token 2 is the better one."""
    trees = batch_of([[-1, 0, 1, 2, 3, 4]], device)
    logits = torch.tensor([0.0, 5.0, 2.5], device=device).expand(6, 3)
    drafts = torch.ones(6, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    at = {"seeds": zero, "positions": zero}
    check(verify_sampled(logits, drafts, trees, params, **at), 0, [0, 1, 2, 3], [1, 1, 1, 2])
    said = RequestOptions.from_lists(3, outputs=[[1, 1]], device=device)  # the root is one of them, and counts once
    check(verify_sampled(logits, drafts, trees, params, **at, options=said), 0, [0, 1], [1, 2])


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


@pytest.mark.parametrize("history", [True, False])
def test_bad_words_across_root_and_path(device, history):
    """[7, 8, 1] begins in the history and ends in the tree; [8, 1] lies in the tree; [3, 8, 1] does not fit."""
    for words, without_history, with_history in (
        ([[7, 8, 1]], 1, 0), ([[8, 1]], 0, 0), ([[3, 8, 1]], 1, 1), ([[8, 8, 1]], 1, 1), ([[6, 7, 8, 1]], 1, 0),
    ):  # fmt: skip
        options = RequestOptions.from_lists(9, prompts=[[6]], outputs=[[7]], bad_words=[words], device=device)
        if not history:
            options = replace(options, history=None, history_lens=None)
        logits = torch.zeros(2, 9, device=device)
        logits[0, 8], logits[1, 1], logits[1, 0] = 5.0, 5.0, 4.0
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        verdict = verify_sampled(
            logits, torch.tensor([7, 8], device=device), batch_of([[-1, 0]], device), GREEDY, seeds=zero,
            positions=zero, options=options,
        )  # fmt: skip
        check_tokens = [8, with_history if history else without_history]
        assert verdict.tokens[0, :2].tolist() == check_tokens


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


def test_everything_forbidden_is_uniform(device):
    count = 600
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    at = {"seeds": zeros, "positions": torch.arange(count, device=device)}
    options = RequestOptions(allowed_mask=torch.zeros(count, 1, dtype=torch.int32, device=device))
    logits = torch.randn(1, 6, device=device).expand(count, 6) * 9
    tokens = sample(logits, SamplingParams(top_k=1, frequency_penalty=1.0), **at, options=options)
    assert tokens.bincount(minlength=6).min() > 60
    assert not sample(logits, GREEDY, **at, options=options).any()
    trees = batch_of([[-1]] * count, device)
    verdict = verify_sampled(logits, zeros, trees, GREEDY, **at, options=options)
    assert (verdict.status == BAD_ROW).all() and not verdict.tokens[:, 0].any()
    verdict = verify_rejection(logits, zeros, trees, GREEDY, draft_law="onehot", **at, options=options)
    assert (verdict.status == BAD_ROW).all()


def test_penalties_without_options(device):
    """`params` alone: what the path says counts."""
    for case in cases(40, ["repetition", "presence", "frequency"], 11, device):
        assert case.options is None and differences(case) == []
        none = replace(case, options=RequestOptions())
        assert differences(none) == []


def test_neutral_options_change_nothing(device):
    for case in cases(40, [], 12, device):
        neutral = RequestOptions.from_lists(
            40, prompts=[[1, 2]] * 6, outputs=[[3, 3]] * 6, allowed=[None] * 6, bias=[{}] * 6, bad_words=[[]] * 6,
            stop_ids=[[1]] * 6, min_positions=[-(2**63)] * 6, device=device,
        )  # fmt: skip
        for name in calls(case):
            given, plain = verify(replace(case, options=neutral), name), verify(case, name)
            assert all(torch.equal(a, b) for a, b in zip(given, plain, strict=True))


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
