"""Request options with draft trees: greedy text is stock vLLM's, seeded text independent of trees."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm_case import (
    LLM,
    NGRAM,
    NO_TREES,
    PREEMPTED,
    RANKS,
    V1_ONLY,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
    VLLMValidationError,
    accepted,
    engine,
    generate,
    of_runner,
    runner_of,
    token_prompts,
    tree_options,
)

from pagedtree.integrations.vllm.scheduler import TreeScheduler

PROMPTS = token_prompts()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
EBNF = 'root ::= "x = " expr\nexpr ::= term (" + " term)*\nterm ::= [a-z]+ | [0-9]+ | "(" expr ")"'

# Options that combine.
OPTIONS: dict[str, dict[str, Any]] = {
    "presence_penalty": dict(presence_penalty=1.1),
    "frequency_penalty": dict(frequency_penalty=0.6),
    "repetition_penalty": dict(repetition_penalty=1.3),
    "min_tokens": dict(min_tokens=14, stop_token_ids=[200, 9]),  # most texts have them sooner
    "min_p": dict(min_p=0.3),
    "logit_bias": dict(logit_bias={5: 3.0, 300: 6.0, 17: -8.0}),
    "allowed_token_ids": dict(allowed_token_ids=list(range(0, 900))),
    "bad_words": dict(bad_words=["name of the", "the name", "lineno, lineno", "#", "def _get"]),
    "logprobs": dict(logprobs=2),
    "prompt_logprobs": dict(prompt_logprobs=1),
}
GRAMMARS: dict[str, Callable[[], StructuredOutputsParams]] = {
    "json": lambda: StructuredOutputsParams(json=SCHEMA),
    "json_object": lambda: StructuredOutputsParams(json_object=True),
    "regex": lambda: StructuredOutputsParams(regex=r"(def|class) [a-z_]{3,9}\((self|x|y)(, [a-z]{1,4}){0,3}\):"),
    "choice": lambda: StructuredOutputsParams(choice=["return self", "return None", "import numpy as np"]),
    "grammar": lambda: StructuredOutputsParams(grammar=EBNF),
}


def request(grammar: str | None = None, **options: Any) -> SamplingParams:
    settings = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": grammar is None, **options}
    if grammar is not None:
        settings["structured_outputs"] = GRAMMARS[grammar]()
    return SamplingParams(**settings)


def subsets(count: int = of_runner(40, 12)) -> list[SamplingParams]:
    choose = random.Random(7)
    found = []
    for n in range(count):
        options: dict[str, Any] = {}
        for name in choose.sample(sorted(OPTIONS), choose.randint(1, 6)):
            options |= OPTIONS[name]
        found.append(request(choose.choice(sorted(GRAMMARS)) if n % 3 == 0 else None, **options))
    return found


def answers(llm: LLM) -> dict[str, Any]:
    found: dict[str, Any] = {"plain": generate(llm, PROMPTS, request())}
    for name, options in OPTIONS.items():
        found[name] = outputs_of(llm, PROMPTS, request(**options))
    for name in GRAMMARS:
        found[f"structured_outputs {name}"] = outputs_of(llm, PROMPTS, request(name))
    mixed = subsets()
    found["subsets"] = outputs_of(llm, cycled(len(mixed)), mixed)
    return found


def cycled(count: int) -> list[list[int]]:
    return [PROMPTS[n % len(PROMPTS)] for n in range(count)]


def outputs_of(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def tokens_of(outputs: list[Any]) -> list[tuple[list[int], str | None]]:
    return [(list(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    """Runs without speculation."""
    with engine(max_num_seqs=16) as llm:
        return answers(llm)


@pytest.fixture(scope="module", params=of_runner(["ngram", "model"], ["ngram"]))
def trees(request, stock) -> dict[str, Any]:
    with engine(**tree_options(request.param), max_num_seqs=8, max_num_batched_tokens=96) as llm:
        found = answers(llm)
        assert accepted(llm) > 200
        return found


@pytest.mark.parametrize("name", [*OPTIONS, *(f"structured_outputs {name}" for name in GRAMMARS), "subsets"])
def test_greedy_text_is_stock(stock, trees, name):
    assert tokens_of(trees[name]) == tokens_of(stock[name])
    if name not in ("min_p", "logprobs", "prompt_logprobs"):  # these leave greedy text unchanged
        assert [tokens for tokens, _ in tokens_of(stock[name])] != stock["plain"]


def check_logprobs(outputs: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(outputs, expected, strict=True):
        same_logprobs(ours.outputs[0].logprobs, theirs.outputs[0].logprobs)
        same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)


def same_logprobs(got: Any, expected: Any) -> None:
    """Values may differ by rounding, candidates and ranks not."""
    assert (got is None) == (expected is None)
    if expected is None:
        return
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is None:
            continue
        ours, theirs = (
            {token: entry for token, entry in table.items() if entry.logprob > -math.inf} for table in (ours, theirs)
        )  # the listed forbidden tokens are arbitrary
        assert {t: (e.rank, e.decoded_token) for t, e in ours.items()} == {
            t: (e.rank, e.decoded_token) for t, e in theirs.items()
        }
        for token, entry in theirs.items():
            assert ours[token].logprob == pytest.approx(entry.logprob, abs=2e-4)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "subsets"])
def test_logprobs_are_stock(stock, trees, name):
    check_logprobs(trees[name], stock[name])
    if name != "prompt_logprobs":
        assert any(output.outputs[0].logprobs for output in stock[name])
    if name != "logprobs":
        assert any(output.prompt_logprobs for output in stock[name])


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_modes_of_logprobs(mode):
    params = [request(logprobs=2, prompt_logprobs=1), *(p for p in subsets(of_runner(60, 20)) if p.logprobs)]
    prompts = cycled(len(params))
    with engine(logprobs_mode=mode) as llm:
        expected = outputs_of(llm, prompts, params)
    with engine(**tree_options("model"), logprobs_mode=mode) as llm:
        found = outputs_of(llm, prompts, params)
        assert accepted(llm) > of_runner(100, 30)
    assert tokens_of(found) == tokens_of(expected)
    check_logprobs(found, expected)


def test_all_logprobs_of_a_token():
    params = request(logprobs=-1, max_tokens=4)
    with engine(max_logprobs=-1) as llm:
        expected = outputs_of(llm, PROMPTS[:2], params)
    assert len(expected[0].outputs[0].logprobs[0]) > 1000
    with engine(**tree_options("ngram"), max_logprobs=-1) as llm:
        found = outputs_of(llm, PROMPTS[:2], params)
    for ours, theirs in zip(found, expected, strict=True):
        for got, right in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert {token: entry.logprob for token, entry in got.items()} == pytest.approx(
                {token: entry.logprob for token, entry in right.items()}, abs=2e-4
            )


def test_beam_search_is_stock():
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    with engine() as llm:
        expected = [[beam.tokens for beam in output.sequences] for output in llm.beam_search(prompts, params)]
    with engine(**tree_options("ngram")) as llm:
        assert [[beam.tokens for beam in output.sequences] for output in llm.beam_search(prompts, params)] == expected


SAMPLINGS = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_p=0.9),
    dict(temperature=0.0),
    dict(temperature=1.3, top_k=20),
    dict(temperature=0.9, top_k=50, top_p=0.8, extra_args={"min_p": 0.02}),
    dict(temperature=1.0, extra_args={"min_p": 0.1}),
]


def seeded() -> list[SamplingParams]:
    params = subsets()
    for n, of_request in enumerate(params):
        of_request.temperature, of_request.top_p, of_request.top_k, of_request.seed = 1.2, 0.95, 50 * (n % 2), 100 + n
        if n % 4 == 1:
            of_request.min_p = 0.1
    return [*params, *(request(**sampling, seed=n) for n, sampling in enumerate(SAMPLINGS))]


def test_seeded_text_does_not_depend_on_trees(stock):
    params = seeded()
    prompts = cycled(len(params))
    with engine(**NO_TREES) as llm:
        expected = tokens_of(outputs_of(llm, prompts, params))
        assert tokens_of(outputs_of(llm, prompts[:5], params[:5])) == expected[:5]
        assert generate(llm, PROMPTS, request()) == stock["plain"]
    for sampling, prompt, (tokens, _) in zip(SAMPLINGS, prompts[-6:], expected[-6:], strict=True):
        assert (tokens == stock["plain"][PROMPTS.index(prompt)]) == (sampling["temperature"] == 0)
    for drafter in ("ngram", "model"):
        with engine(**tree_options(drafter), max_num_batched_tokens=96) as llm:
            assert tokens_of(outputs_of(llm, prompts, params)) == expected
            assert accepted(llm) > of_runner(10, 2)


@pytest.mark.parametrize("backend", ["guidance", "outlines"])  # vLLM 0.32 cannot import lm-format-enforcer's part
def test_other_grammar_engines(backend):
    config = {"backend": backend}
    names = ["regex", "json"] if backend == "guidance" else ["regex"]
    with engine(structured_outputs_config=config) as llm:
        expected = [tokens_of(outputs_of(llm, PROMPTS, request(name))) for name in names]
    with engine(**tree_options("model"), structured_outputs_config=config) as llm:
        assert [tokens_of(outputs_of(llm, PROMPTS, request(name))) for name in names] == expected
        assert accepted(llm) > 10


class Reasoner:
    """Reasoning ends at token `end`."""

    end = 200

    def __init__(self, tokenizer: Any = None, **options: Any) -> None:
        pass

    def is_reasoning_end(self, ids: Any) -> bool:
        return False

    def is_reasoning_end_streaming(self, ids: Any, delta: Any) -> bool:
        return self.end in delta


def test_grammars_begin_behind_the_reasoning():
    expected: list[Any] = []
    for options in ({}, tree_options("ngram"), tree_options("model")):
        with engine(**options) as llm:
            llm.llm_engine.engine_core.engine_core.structured_output_manager.reasoner_cls = Reasoner
            found = tokens_of(outputs_of(llm, PROMPTS, request("regex")))
            if options:
                assert found == expected
                assert accepted(llm) > 0
            expected = found
    assert any(Reasoner.end in tokens[1:] for tokens, _ in expected)


def test_text_behind_the_end_of_a_grammar_is_free():
    """With ignore_eos vLLM continues after the grammar's end."""
    params = request("choice")
    params.ignore_eos = True
    with engine() as llm:
        expected = tokens_of(outputs_of(llm, PROMPTS, params))
    assert any(len(tokens) == params.max_tokens for tokens, _ in expected)
    for drafter in ("ngram", "model"):
        with engine(**tree_options(drafter)) as llm:
            assert tokens_of(outputs_of(llm, PROMPTS, params)) == expected


def test_separate_processes():
    """Both ranks sample, and grammars are in another process."""
    params = subsets(12)
    prompts = cycled(len(params))
    with engine(max_num_seqs=16) as llm:
        expected = tokens_of(outputs_of(llm, prompts, params))
    with engine(**tree_options("model"), **RANKS) as llm:
        assert tokens_of(outputs_of(llm, prompts, params)) == expected


def test_preempted_requests_keep_their_options():
    params = subsets(6)
    with engine() as llm:
        expected = tokens_of(outputs_of(llm, PROMPTS, params))
    with engine(**tree_options("model"), **PREEMPTED, enable_prefix_caching=False) as llm:
        assert tokens_of(outputs_of(llm, PROMPTS, params)) == expected


def test_other_drafters_keep_vllms_refusals():
    with engine(speculative_config=NGRAM) as llm:
        for name in ("min_p", "logit_bias"):
            with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
                generate(llm, PROMPTS[:1], SamplingParams(temperature=0.5, **OPTIONS[name]))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert not isinstance(scheduler, TreeScheduler)


@V1_ONLY
def test_unused_options_make_no_tensor_and_no_thread():
    """No options make no tensor, no grammars no thread."""
    with engine(**tree_options("ngram")) as llm:
        generate(llm, PROMPTS)
        assert runner_of(llm)._options._options is None
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert isinstance(scheduler, TreeScheduler) and scheduler._masks._last is None
