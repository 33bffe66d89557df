"""Request options on vocabularies in parts: what the whole ops give, bit for bit, for any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from options_case import CHAINS, PARTS, SAMPLED, TREES, VOCAB, batch_of, good_case, hostile_options, make_case
from ranks import Ranks
from shard_case import shards_of

import pagedtree
from pagedtree import RequestOptions, SamplingParams, distributed
from pagedtree.check.cases.inputs import as_words
from pagedtree.testing import backends, use_backend

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

HOST_BACKENDS = [name for name in backends() if name != "cuda"]
# Columns of each rank, as fractions; what is left belongs to the last one.
SPLITS = {
    1: [[]],
    2: [[0.5], [0.0]],
    3: [[0.3, 0.4], [0.03, 0.0]],
    8: [[0.125] * 7, [0.0, 0.31, 0.01, 0.0, 0.2, 0.1, 0.1]],
}
LAWS = ("iid", "swor", "onehot")


@pytest.fixture(scope="module")
def many_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(tmp_path_factory.mktemp("ranks"), num_ranks=max(SPLITS))
    yield processes
    processes.close()


def equal(a: tuple, b: tuple) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def compare(group: object, backend: str, size: int, seeds: int, parts: tuple[str, ...]) -> tuple[list[str], list]:
    """Lists the results that differ from the whole ops, and what rejection gives."""
    wrong, seen = [], []
    vocab = 1003 if backend == "cpu" else 203
    with use_backend(backend):
        for seed in range(seeds):
            dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
            case = make_case(vocab, parts, seed=seed, dtype=dtype, parents=(TREES, CHAINS)[seed % 2])
            batch, mask = len(case.seeds), case.grammar_mask
            given = {**case.streams, "options": case.options}
            if seed % 2:
                to_target = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
                case.drafts = torch.where(case.drafts < 0, -1, to_target.argsort()[case.drafts])
                given["draft_to_target"] = to_target
            tree = (case.drafts, case.trees)
            laws = [(law, {} if law == "onehot" else {"draft_probs": case.probs}) for law in LAWS]
            for i, fractions in enumerate(SPLITS[size]):
                shards = shards_of(group, fractions, vocab)
                logits, part = shards.own(case.logits), None if mask is None else shards.own(mask)
                if i % 2 and part is not None:
                    part = as_words(part)
                for name, plain in SAMPLED.items():
                    params = replace(plain, **case.penalties)
                    whole = pagedtree.verify_sampled(case.logits, *tree, params, **given, grammar_mask=mask)
                    got = distributed.verify_sampled(logits, *tree, params, **given, grammar_mask=part, shards=shards)
                    wrong += [] if equal(got, whole) else [f"verify_sampled {name} {fractions} {seed}: {got} {whole}"]
                    rows = mask if mask is None else mask[:batch]
                    of_rows = {**case.streams, "options": case.options}
                    drawn = pagedtree.sample(case.logits[:batch], params, **of_rows, grammar_mask=rows)
                    rows = part if part is None else part[:batch]
                    got = distributed.sample(logits[:batch], params, **of_rows, grammar_mask=rows, shards=shards)
                    wrong += [] if torch.equal(got, drawn) else [f"sample {name} {fractions} {seed}: {got} {drawn}"]
                for law, drafts in laws:
                    params = replace(SAMPLED["filtered" if law == "swor" else "sampled"], **case.penalties)
                    drafts = {"draft_law": law, **drafts}
                    whole = pagedtree.verify_rejection(case.logits, *tree, params, **given, **drafts, grammar_mask=mask)
                    got = distributed.verify_rejection(
                        logits, *tree, params, **given, **drafts, grammar_mask=part, shards=shards
                    )
                    seen.append([t.tolist() for t in got])
                    # The whole op adds floats: a coin within 1e-6 of a boundary may fall otherwise, which none does.
                    wrong += [] if equal(got, whole) else [f"rejection {law} {fractions} {seed}: {got} {whole}"]
    return wrong, seen


def check(found: list[tuple[list[str], list]]) -> None:
    for wrong, seen in found:
        assert wrong == []
        assert seen == found[0][1]


def few(*combinations: tuple[int, str]) -> pytest.MarkDecorator:
    """All numbers of ranks on all backends, of which these are in the core suite."""
    every = [(size, backend) for size in (1, 2, 3) for backend in HOST_BACKENDS]
    cases = [pytest.param(*case, marks=[] if case in combinations else pytest.mark.slow) for case in every]
    return pytest.mark.parametrize(("size", "backend"), cases)


@few((2, "cpu"), (3, "cpu"), (3, "simt"))
def test_all_options(ranks, size, backend):
    check(ranks.run(compare, size, backend, size, 2 if size == 2 else 1, PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["repetition", "counts", "allowed", "bias", "bad_words", "stops", "grammar"])
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_each_option(ranks, part, backend):
    check(ranks.run(compare, 3, backend, 3, 1, (part,)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize("size", SPLITS)
def test_many_ranks(many_ranks, size, backend):
    for parts in (PARTS, ("stops", "allowed", "bias"), ("counts", "prompt", "frequency"), ("bad_words", "grammar")):
        check(many_ranks.run(compare, size, backend, size, 6, parts))


def least_length(group: object, backend: str, size: int) -> list[tuple[object, list[int]]]:
    """Stop ids 1 and 30 of 40; what else is allowed lies on one rank, on another, nowhere."""
    found = []
    vocab = 40
    with use_backend(backend):
        for others, expected in (([], [1, 30]), ([39], [39]), ([0], [0]), ([15], [15]), ([0, 39], [0, 39])):
            for kind in ("allowed", "bias"):
                keep = [*others, 1, 30]
                options = RequestOptions.from_lists(
                    vocab, stop_ids=[[1, 30]], min_positions=[100],
                    **({"allowed": [keep]} if kind == "allowed" else
                       {"bias": [{x: -float("inf") for x in range(vocab) if x not in keep}]}),
                )  # fmt: skip
                logits = torch.zeros(1, vocab)
                at = {"seeds": torch.tensor([5]), "positions": torch.tensor([7]), "options": options}
                none = torch.zeros(1, dtype=torch.int64)
                for fractions in SPLITS[size]:
                    shards = shards_of(group, fractions, vocab)
                    own = shards.own(logits)
                    tokens = [
                        int(distributed.sample(own, SamplingParams(), **at, shards=shards)),
                        int(distributed.verify_sampled(
                            own, none, batch_of([[-1]]), SamplingParams(), **at, shards=shards).tokens[0, 0]),
                        int(distributed.verify_rejection(
                            own, none, batch_of([[-1]]), SamplingParams(), draft_law="onehot", **at, shards=shards,
                        ).tokens[0, 0]),
                    ]  # fmt: skip
                    whole = int(pagedtree.sample(logits, SamplingParams(), **at))
                    if tokens[:2] != [whole, whole] or not {*tokens} <= {*expected}:
                        found.append((fractions, kind, others, tokens, whole))
    return found


@few((2, "simt"), (3, "cpu"))
def test_stop_ids_where_nothing_else_is_left(ranks, size, backend):
    for wrong in ranks.run(least_length, size, backend, size):
        assert wrong == []


@pytest.mark.slow
def test_stop_ids_on_many_ranks(many_ranks):
    for wrong in many_ranks.run(least_length, 8, "cpu", 8):
        assert wrong == []


def disagree(group: object, what: str) -> None:
    case = make_case(203, PARTS, seed=3)
    shards = shards_of(group, [0.3, 0.4], 203)
    options, params = case.options, replace(SamplingParams(), **case.penalties)
    if torch.distributed.get_rank(group) == 1:
        if what == "penalty":
            params = replace(params, presence_penalty=0.125)
        elif what == "absent":
            options = None
        else:
            changed = getattr(options, what).clone()
            changed.view(-1)[1] += 1
            options = replace(options, **{what: changed})
    distributed.verify_sampled(
        shards.own(case.logits), case.drafts, case.trees, params, **case.streams, options=options, shards=shards
    )


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("penalty", "`presence_penalty`"),
        ("absent", "`(prompt_mask|output_counts|allowed_mask|bias_tokens)`"),
        ("bias_tokens", "`bias_tokens`"),
        ("min_position", "`min_position`"),
    ],
)
def test_ranks_that_disagree_are_told_apart(ranks, what, named):
    for error in ranks.outcomes(disagree, 3, what):
        assert isinstance(error, ValueError) and re.search(named, str(error)), error


def any_values(group: object, backend: str) -> list[int]:
    """Options of which nothing can be relied on, in two parts; which seeds differ from the whole ops."""
    wrong = []
    with use_backend(backend):
        shards = shards_of(group, [0.4], VOCAB)
        for seed in range(12):
            case = good_case(torch.device("cpu"), seed % 4)
            options = hostile_options(case, torch.Generator().manual_seed(seed))
            params = replace(SAMPLED["sampled"], **case.penalties)
            tree, given = (case.drafts, case.trees), {**case.streams, "options": options}
            whole = pagedtree.verify_sampled(case.logits, *tree, params, **given)
            got = distributed.verify_sampled(shards.own(case.logits), *tree, params, **given, shards=shards)
            distributed.verify_rejection(
                shards.own(case.logits), *tree, params, **given, draft_law="onehot", shards=shards
            )
            wrong += [] if equal(got, whole) else [seed]
    return wrong


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_any_values(ranks, backend):
    for wrong in ranks.run(any_values, 2, backend):
        assert wrong == []
