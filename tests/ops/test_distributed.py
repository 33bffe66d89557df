"""Sharded verification by processes: traffic, disagreement, loss; check has the rest."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
from support.batches import tied_case
from support.ranks import Ranks, shards_of

from pagedtree import RequestOptions, SamplingParams, distributed
from pagedtree.distributed import GroupError, Traffic, VocabShards

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

PARAMS = {
    "plain": SamplingParams(temperature=0.8),
    "both": SamplingParams(temperature=0.9, top_k=12, top_p=0.7, min_p=0.01),
}


# ---- traffic


def count_traffic(group: object, vocab: int, copies: int) -> dict[str, tuple[int, int, int]]:
    parents = [[-1, 0, 0, 1, 1, 2, 3]] * copies
    case = tied_case(vocab, torch.bfloat16, 0, parents)
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
    agreed = 48  # words of compared arguments
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


# ---- ranks that disagree or die


def disagree(group: object, what: str) -> None:
    vocab = 1003
    case = tied_case(vocab, torch.float32, 0)
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
        ("top_p", "top_p:"),
        ("presence_penalty", "presence_penalty:"),
        ("options", "bias_tokens:"),
        ("bias_tokens", "bias_tokens:"),
        ("min_position", "min_position:"),
        ("seeds", "seeds:"),
        ("draft_tokens", "draft_tokens:"),
        ("rows", "logits:"),
        ("dtype", "logits:"),
        ("columns", "logits:"),
        ("call", "the call"),
    ],
)
def test_ranks_that_disagree_are_told_apart(ranks, what, named):
    for error in ranks.outcomes(disagree, 3, what):
        assert isinstance(error, ValueError) and named in str(error), error


def die(group: object, at_once: bool) -> float:
    """Rank 1 exits or stays silent; returns the others' waiting time."""
    rank = torch.distributed.get_rank(group)
    vocab = 1003
    case = tied_case(vocab, torch.float32, 0)
    shards = shards_of(group, [0.3, 0.4], vocab)
    if rank == 1:
        if at_once:
            os._exit(1)
        time.sleep(4)  # the others time out after 2.5
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
