"""Extreme sampling fields neither end the engine nor change another request.

PAGEDTREE_REQUESTS: number of drawn requests.
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Iterator
from typing import Any

from vllm_case import LLM, SamplingParams, VLLMValidationError, accepted, engine, of_runner, token_prompts, tree_options

COUNT = int(os.environ.get("PAGEDTREE_REQUESTS", of_runner(60, 8)))
PROMPTS = [prompt[-40:] for prompt in token_prompts(8)]
VOCAB = 2048
LARGE = [2**31 - 1, 2**31, 2**63 - 1, 2**63]  # 2^64 does not fit in vLLM's messages
ENDS: dict[str, list[Any]] = {
    "n": [3],
    "temperature": [0.0, 1e-300, 0.01, 2.0],
    "top_p": [1e-300, 1e-9, 1.0],
    "top_k": [-1, 0, 1, VOCAB, VOCAB + 1, *LARGE, 2**64 - 1],
    "min_p": [0.0, 1e-300, 1.0],
    "extra_args": [{"min_p": 0}, {"min_p": 1}, {"min_p": 1e-300}, {"min_p": 2}, {"other": 2**64 - 1}],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [1e-300, 1e-30, 2.0, 1e30, 1e308],
    "seed": [-(2**63), 0, *LARGE, 2**64 - 1, 2**70, 1.5],
    "max_tokens": [1, *LARGE, None],
    "min_tokens": [0, 2, 60, *LARGE],
    "logprobs": [0, 1, VOCAB, -1],
    "prompt_logprobs": [0, VOCAB, -1],
    "flat_logprobs": [True],
    "stop_token_ids": [[0], [VOCAB - 1], [*range(200)], [-1], [2**31]],
    "stop": ["e", "e" * 10_000],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "detokenize": [False],
    "stream_interval": [1, 2**63],
    "logit_bias": [
        {0: 100, VOCAB - 1: -100},
        {5: math.inf},
        {5: -math.inf, 6: 1e39, 7: -1e39},
        {5: math.nan},
        {5: True},
        {5: 10**400},
        {VOCAB: 1},
        {5: "much"},
        dict.fromkeys(range(1100), 1.0),
    ],
    "allowed_token_ids": [[0], [VOCAB - 1, 7, 7], [*range(VOCAB)], [VOCAB], [5.5], [-1]],
    "bad_words": [["e"], ["the name " * 600], [f"a{n}" for n in range(140)]],
}
WITNESSES = [
    dict(temperature=0.0),
    dict(temperature=0.0, presence_penalty=1.0, logit_bias={5: 2.0}, min_tokens=3, stop_token_ids=[200]),
    dict(temperature=1.0, seed=3, top_k=50, logprobs=1),
]


def drawn() -> Iterator[tuple[list[int], dict[str, Any]]]:
    choose = random.Random(11)
    for _ in range(COUNT):
        fields = {name: choose.choice(ENDS[name]) for name in choose.sample(sorted(ENDS), choose.randint(1, 5))}
        yield choose.choice(PROMPTS), {"temperature": choose.choice([0.0, 0.7]), "max_tokens": 4, **fields}


def serve(llm: LLM, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    """Serves requests at once: each outcome's tokens, or the error."""
    found: list[Any] = [None] * len(requests)
    ids = {}
    for index, (prompt, fields) in enumerate(requests):
        try:
            params = SamplingParams(**copy.deepcopy(fields))
            ids[llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)] = index
        except (ValueError, VLLMValidationError) as error:
            found[index] = str(error)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                found[int(output.request_id)] = [list(outcome.token_ids) for outcome in output.outputs]
    return found


def as_stock_takes_it(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns fields of the same greedy text that stock vLLM survives."""
    fields = {**fields, "seed": None, "top_k": 0}
    fields |= {name: min(fields[name], 99) for name in ("max_tokens", "min_tokens") if fields.get(name)}
    if 5 in fields.get("logit_bias", {}) and fields["logit_bias"][5] > 1e39:
        fields["logit_bias"] = {5: 1e39}
    if "logit_bias" in fields and "allowed_token_ids" in fields:  # stock vLLM accepts inf or NaN on a masked token
        allowed = fields["allowed_token_ids"]
        fields["logit_bias"] = {token: bias for token, bias in fields["logit_bias"].items() if token in allowed}
    return fields


def test_every_field_at_the_ends_of_its_range():
    settings = {"max_model_len": 64, "max_num_seqs": 8, "max_logprobs": -1}
    witnesses = [(PROMPTS[n], {"max_tokens": 8, "ignore_eos": True, **WITNESSES[n]}) for n in range(len(WITNESSES))]
    requests, found = [*drawn()], []
    with engine(**tree_options("model"), **settings) as llm:
        alone = serve(llm, witnesses)
        for begin in range(0, COUNT, 6):
            part = serve(llm, [*witnesses, *requests[begin : begin + 6]])
            assert part[: len(witnesses)] == alone, requests[begin : begin + 6]
            found += part[len(witnesses) :]
        assert accepted(llm) > COUNT / 10
    assert all(found) and sum(isinstance(one, str) for one in found) < 0.6 * COUNT
    served = [(*request, got) for request, got in zip(requests, found, strict=True) if not isinstance(got, str)]
    # A sampler may draw any token from NaN.
    greedy = [one for one in served if one[1]["temperature"] == 0 and one[1].get("logit_bias") != {5: math.nan}]
    with engine(**settings) as llm:
        expected = serve(llm, [(prompt, as_stock_takes_it(fields)) for prompt, fields, _ in greedy])
    differing = [(*of, want) for of, want in zip(greedy, expected, strict=True) if of[-1] != want]
    assert not differing, repr(differing[:9])
