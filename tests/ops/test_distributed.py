"""Verification of vocabularies in parts: the same on every rank, and bit for bit what the whole op gives."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import lossless_case
import pytest
import torch
from ranks import Ranks
from shard_case import SPLITS, make_case, per_request, shards_of

import pagedtree
from pagedtree import RequestOptions, SamplingParams, distributed
from pagedtree._ops import ops
from pagedtree.check.cases.inputs import as_words
from pagedtree.distributed import GroupError, Traffic, VocabShards
from pagedtree.distributed.protocol import ROW_WORDS
from pagedtree.testing import backends, use_backend

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

HOST_BACKENDS = [name for name in backends() if name != "cuda"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARAMS = {
    "plain": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=1.1, top_k=7),
    "top_p": SamplingParams(top_p=0.8),
    "both": SamplingParams(temperature=0.9, top_k=12, top_p=0.7, min_p=0.01),
    "joint": SamplingParams(temperature=0.9, top_k=12, top_p=0.7, min_p=0.01, filter_order="joint"),
    "each": None,  # per request
}


def params_of(name: str, batch: int) -> SamplingParams:
    return PARAMS[name] or per_request(batch)


def vocab_of(backend: str) -> int:
    return 1003 if backend == "cpu" else 203


def part_of_mask(shards: VocabShards, allowed: torch.Tensor | None, packed: bool) -> torch.Tensor | None:
    if allowed is None:
        return None
    part = shards.own(allowed)
    return as_words(part) if packed else part


def same(a: tuple, b: tuple) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- greedy and sampled


def compare_sampled(group: object, backend: str, size: int, dtype: torch.dtype, name: str) -> list[str]:
    """Lists the results that differ from the whole ops, over splits and grammar masks."""
    wrong = []
    with_greedy = name in ("both", "each")  # it has no parameters: once or twice for each size, backend and dtype
    with use_backend(backend):
        vocab = vocab_of(backend)
        case = make_case(vocab, dtype, seed=size)
        params = params_of(name, case.trees.batch_size)
        row_params = params_of(name, case.logits.shape[0])
        rows = {"seeds": torch.arange(case.logits.shape[0]), "positions": torch.arange(case.logits.shape[0]) * 3}
        for mask, packed in (("none", False), ("bool", False), ("bool", True)):
            allowed = case.masks[mask]
            whole_mask = as_words(allowed) if packed else allowed
            limit = {"tokens_left": torch.arange(case.trees.batch_size).int() % 4 - 1 if packed else None}
            masked = {"grammar_mask": whole_mask, **limit}
            right = pagedtree.verify_sampled(case.logits, case.drafts, case.trees, params, **case.streams, **masked)
            greedy = pagedtree.verify_greedy(case.logits, case.drafts, case.trees, **masked)
            for fractions in SPLITS[size]:
                shards = shards_of(group, fractions, vocab)
                part = {"shards": shards, "grammar_mask": part_of_mask(shards, allowed, packed), **limit}
                logits = shards.own(case.logits)
                got = distributed.verify_sampled(logits, case.drafts, case.trees, params, **case.streams, **part)
                if not same(got, right):
                    wrong.append(f"verify_sampled {fractions} mask {mask} packed {packed}: {got} {right}")
                got = distributed.verify_greedy(logits, case.drafts, case.trees, **part) if with_greedy else greedy
                if not same(got, greedy):
                    wrong.append(f"verify_greedy {fractions} mask {mask} packed {packed}: {got} {greedy}")
                if mask == "none":
                    got = distributed.sample(logits, row_params, **rows, shards=shards)
                    if not torch.equal(got, pagedtree.sample(case.logits, row_params, **rows)):
                        wrong.append(f"sample {fractions}: {got}")
    return wrong


@pytest.mark.parametrize(
    ("size", "backend", "dtype", "name"),
    [  # all parameters, dtypes and splits on two backends: the rows of check, with threads as ranks
        (3, "cpu", torch.bfloat16, "both"),
        (3, "cpu", torch.float32, "joint"),
        (4, "cpu", torch.float16, "each"),
        *[(3, "simt", torch.bfloat16, "each")] * ("simt" in HOST_BACKENDS),
    ],
)
def test_sampled_and_greedy_are_those_of_the_whole(ranks, size, backend, dtype, name):
    for wrong in ranks.run(compare_sampled, size, backend, size, dtype, name):
        assert wrong == []


def three_tokens(group: object, rule: str, law: str) -> tuple[float, list[list[int]]]:
    """Steps of `expand_tree` and the rule: how far the first three tokens are off the target, and some of them."""
    shards = shards_of(group, [0.34, 0.34], lossless_case.VOCAB)
    tokens, _ = lossless_case.first_tokens(rule, law, [3, 1], "flat", 20_000, torch.device("cpu"), shards=shards)
    return lossless_case.off_the_target(tokens, "flat"), tokens[:100].tolist()


@pytest.mark.parametrize(
    ("rule", "law"), [("rejection", "iid"), ("rejection", "swor"), ("rejection", "topk"), ("sampled", "coupled")]
)
def test_tokens_follow_the_target(ranks, rule, law):
    first, *others = ranks.run(three_tokens, 3, rule, law)
    assert all(other == first for other in others)
    assert first[0] < lossless_case.LIMIT


# ---- what is exchanged


def count_traffic(group: object, vocab: int, copies: int) -> dict[str, tuple[int, int, int]]:
    parents = [[-1, 0, 0, 1, 1, 2, 3]] * copies
    case = make_case(vocab, torch.bfloat16, 0, parents)
    shards = shards_of(group, [0.25, 0.25, 0.25], vocab)
    logits = shards.own(case.logits)
    found = {}
    calls = {
        "greedy": lambda: distributed.verify_greedy(logits, case.drafts, case.trees, shards=shards),
        "sampled": lambda: distributed.verify_sampled(
            logits, case.drafts, case.trees, PARAMS["plain"], **case.streams, shards=shards
        ),
        "filtered": lambda: distributed.verify_sampled(
            logits, case.drafts, case.trees, PARAMS["both"], **case.streams, shards=shards
        ),
        "onehot": lambda: distributed.verify_rejection(
            logits, case.drafts, case.trees, PARAMS["plain"], draft_law="onehot", **case.streams, shards=shards
        ),
    }
    for name, function in calls.items():
        shards.traffic = Traffic()
        function()
        traffic = shards.traffic
        found[name] = (traffic.exchanges, traffic.words, traffic.bytes_sent(4))
    found["gathered"] = (1, 0, shards.gather_bytes(case.logits.shape[0], torch.bfloat16))
    return found


def test_words_do_not_grow_with_the_vocabulary(ranks):
    small, large = (ranks.run(count_traffic, 4, vocab, 1)[0] for vocab in (1000, 4000))
    twice = ranks.run(count_traffic, 4, 1000, 2)[0]
    agreed = 48  # words that compare arguments
    for name in ("greedy", "sampled", "filtered", "onehot"):
        assert small[name] == large[name]
        assert twice[name][0] == small[name][0]
        assert twice[name][1] - agreed == 2 * (small[name][1] - agreed)
    rows = 7
    assert small["greedy"][1:] == (agreed + 2 * rows, 8 * (2 * 2 * rows * 3 // 4 + agreed * 3))
    assert small["sampled"][1] == agreed + 3 * rows
    assert small["filtered"][1] == agreed + (3 + 2 * 4 * 16 + 1) * rows
    assert small["onehot"][1] == agreed + 4 * rows + 3
    assert large["gathered"][2] == 7 * 4000 * 2 * 3 // 4


# ---- raw ops


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_token": 1}, r"`first_token` must be in 0..0, got 1"),
        ({"vocab": 0}, r"`vocab` must be in 1..2\^20, got 0"),
        ({"digit": 8}, "`digit` must be a digit of the logits' keys, got 8"),
        ({"rank": 1}, "`rank` must be in 0..num_ranks - 1, got 1"),
        ({"last": 2}, "`received` must be the words of the round `last`"),
    ],
)
def test_raw_ops_refuse(change, message):
    logits = torch.zeros(9, 33)
    rows, words = (torch.zeros(9, n, dtype=torch.int64) for n in (ROW_WORDS, 2))
    part = {"rank": 0, "num_ranks": 1, "first_token": 0, "vocab": 33}
    rounds = {"round": 1, "digit": 0, "last": 0}
    with pytest.raises(RuntimeError, match=message):
        ops.step_shards(logits, rows, None, words, *SamplingParams().on(logits.device), **{**part, **rounds, **change})


# ---- ranks that disagree or die


def disagree(group: object, what: str) -> None:
    vocab = 1003
    case = make_case(vocab, torch.float32, 0)
    shards = shards_of(group, [0.3, 0.4], vocab)
    params, batch = PARAMS["both"], case.trees.batch_size
    options = RequestOptions.from_lists(
        vocab, bias=[{1: 0.5, 7: 2.0}] * batch, stop_ids=[[1]] * batch, min_positions=[5] * batch
    )
    logits, drafts, seeds = shards.own(case.logits), case.drafts, case.seeds
    changes = {
        "top_p": {"params": replace(params, top_p=0.71)},
        "presence_penalty": {"params": replace(params, presence_penalty=0.125)},
        "options": {"options": None},
        "bias_tokens": {"options": replace(options, bias_tokens=options.bias_tokens + 1)},
        "min_position": {"options": replace(options, min_position=options.min_position + 1)},
        "seeds": {"seeds": seeds + 1},
        "draft_tokens": {"draft_tokens": torch.where(torch.arange(len(drafts)) == 2, drafts + 1, drafts)},
        "rows": {"logits": logits[:-1]},
        "dtype": {"logits": logits.bfloat16()},
        "columns": {"logits": logits[:, :-1]},
    }
    arguments = {"logits": logits, "draft_tokens": drafts, "params": params, "options": options, **case.streams}
    if torch.distributed.get_rank(group) == 1:
        if what == "call":
            distributed.verify_greedy(logits, drafts, case.trees, shards=shards)
            return
        arguments |= changes[what]
    distributed.verify_sampled(trees=case.trees, **arguments, shards=shards)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("top_p", "`top_p`"),
        ("presence_penalty", "`presence_penalty`"),
        ("options", "`bias_tokens`"),
        ("bias_tokens", "`bias_tokens`"),
        ("min_position", "`min_position`"),
        ("seeds", "`seeds`"),
        ("draft_tokens", "`draft_tokens`"),
        ("rows", "`logits`"),
        ("dtype", "`logits`"),
        ("columns", "`logits`"),
        ("call", "the call"),
    ],
)
def test_ranks_that_disagree_are_told_apart(ranks, what, named):
    for error in ranks.outcomes(disagree, 3, what):
        assert isinstance(error, ValueError) and named in str(error), error


def die(group: object, at_once: bool) -> float:
    """Rank 1 is gone, or does not answer; returns how long the others waited."""
    rank = torch.distributed.get_rank(group)
    vocab = 1003
    case = make_case(vocab, torch.float32, 0)
    shards = shards_of(group, [0.3, 0.4], vocab)
    if rank == 1:
        if at_once:
            os._exit(1)
        time.sleep(4)  # the others are told after 2.5
        return 0.0
    begin = time.perf_counter()
    with pytest.raises(GroupError, match=r"verify_sampled.* rank [02] of 3 got no answer"):
        distributed.verify_sampled(
            shards.own(case.logits), case.drafts, case.trees, PARAMS["both"], **case.streams, shards=shards
        )
    return time.perf_counter() - begin


@pytest.mark.parametrize(
    "at_once", [pytest.param(True, id="dead"), pytest.param(False, id="silent", marks=pytest.mark.slow)]
)
def test_a_lost_rank_is_an_error_on_the_others(tmp_path, at_once):
    timeout = 2.5
    processes = Ranks(tmp_path, num_ranks=3, timeout=timeout)
    try:
        first, lost, last = processes.outcomes(die, 3, at_once)
    finally:
        processes.close()
    for waited in (first, last):
        assert isinstance(waited, float), waited
        assert waited < timeout + 3
    assert lost == (None if at_once else 0.0)


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="initialised"):
        VocabShards(4)
