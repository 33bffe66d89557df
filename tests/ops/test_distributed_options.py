"""Request options on vocabularies in parts: what the whole ops give, bit for bit, for any number of ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from options_case import CHAINS, PARTS, SAMPLED, TREES, VOCAB, good_case, hostile_options, make_case
from shard_case import shards_of

import pagedtree
from pagedtree import SamplingParams, distributed
from pagedtree.check.cases.inputs import as_words
from pagedtree.testing import backends, use_backend

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

HOST_BACKENDS = [name for name in backends() if name != "cuda"]
SPLITS = [[0.3, 0.4], [0.03, 0.0]]  # columns of two ranks, as fractions; the others belong to the third
LAWS = ("iid", "swor", "onehot")


def equal(a: tuple, b: tuple) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def compare(group: object, backend: str) -> tuple[list[str], list]:
    """Lists the results that differ from the whole ops, and what rejection gives."""
    wrong, seen = [], []
    vocab = 1003 if backend == "cpu" else 203
    with use_backend(backend):
        for seed in range(2):
            dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
            case = make_case(vocab, PARTS, seed=seed, dtype=dtype, parents=(TREES, CHAINS)[seed % 2])
            batch, mask = len(case.seeds), case.grammar_mask
            given = {**case.streams, "options": case.options}
            if seed % 2:
                to_target = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
                case.drafts = torch.where(case.drafts < 0, -1, to_target.argsort()[case.drafts])
                given["draft_to_target"] = to_target
            tree = (case.drafts, case.trees)
            laws = [(law, {} if law == "onehot" else {"draft_probs": case.probs}) for law in LAWS]
            for i, fractions in enumerate(SPLITS):
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


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_all_options(ranks, backend):
    """Each option by itself, and two ranks: the rows of check, with threads as ranks."""
    found = ranks.run(compare, 3, backend)
    for wrong, seen in found:
        assert wrong == []
        assert seen == found[0][1]


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
