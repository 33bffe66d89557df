"""What draft trees do not support is refused by name, at the start or when the request is made."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from vllm_case import (
    DRAFT,
    LLM,
    RUNNER,
    SamplingParams,
    VLLMValidationError,
    engine,
    generate,
    of_runner,
    token_prompts,
    tree_options,
)

from pagedtree.integrations.vllm.drafters import NgramTreeDrafter
from pagedtree.integrations.vllm.limits import check_request, min_p_of

REQUESTS = {
    "logprob_token_ids": dict(logprob_token_ids=[5, 6]),
    "min_p": dict(extra_args={"min_p": 1.5}),
}


def test_unsupported_requests_are_refused_and_the_engine_lives():
    prompts = token_prompts(2)
    with engine(**tree_options("ngram")) as llm:
        expected = generate(llm, prompts)
        for name, options in REQUESTS.items():
            with pytest.raises(VLLMValidationError, match=name):
                generate(llm, prompts, SamplingParams(temperature=0.5, **options))
        assert generate(llm, prompts) == expected
    with engine() as llm:  # an engine without trees in the same process takes them
        generate(llm, prompts, SamplingParams(temperature=0.5, **REQUESTS["logprob_token_ids"], max_tokens=2))


@pytest.mark.parametrize("name", ["thinking_token_budget", "trace_decode_token_ids"])
def test_what_vllm_needs_more_settings_for_is_refused_by_name(name):
    params = SamplingParams()
    setattr(params, name, [3] if name.endswith("ids") else 3)
    with pytest.raises(ValueError, match=f"draft trees: {name} is not supported"):
        check_request(params)


def test_min_p_comes_from_either_place():
    assert min_p_of(SamplingParams(min_p=0.25)) == 0.25
    assert min_p_of(SamplingParams(extra_args={"min_p": 0.5})) == 0.5
    with pytest.raises(ValueError, match="min_p"):
        check_request(SamplingParams(extra_args={"min_p": "much"}))


def start(**options) -> LLM:
    with engine(**options) as llm:
        return llm


def speculating(drafter: str = "ngram", **changes) -> dict[str, Any]:
    """Options of an engine with trees whose speculative configuration is changed."""
    options = tree_options(drafter)
    options["speculative_config"].update(changes)
    return options


NGRAMS = tree_options("ngram")
WORKER = {"worker_cls": "pagedtree.integrations.vllm.worker.TreeCPUWorker"}
DRAFT_MODEL = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 2}
PROCESSOR = "vllm.v1.sample.logits_processor:MinPLogitsProcessor"
USES_V2 = "VLLM_USE_V2_MODEL_RUNNER"
DRAFTERS = "pagedtree.integrations.vllm.drafters."
DIVISOR = "draft_tensor_parallel_size: expected a divisor of tensor_parallel_size = "
METHOD_OF = "speculative_config.method on model runner "
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("pipeline_parallel_size", {**NGRAMS, "pipeline_parallel_size": 2}),
    ("enable_lora", {**NGRAMS, "enable_lora": True}),
    ("attention_backend", {**NGRAMS, "attention_backend": "CPU_ATTN"}),
    ("scheduler_cls", {**NGRAMS, "scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}),
    ("head_size", {**NGRAMS, "hf_overrides": {"head_dim": 32}}),
    ("worker_cls", {**NGRAMS, "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}),
    ("logits_processors", {**WORKER, "logits_processors": [PROCESSOR]}),
    ("method", {**WORKER, "speculative_config": DRAFT_MODEL}),
    ("max_branchs", tree_options("ngram", max_branchs=2)),
    ("expected tree = ", tree_options("ngram", tree="some")),
    ("expected the entry model", {**tree_options("model"), "additional_config": {}}),
    ("num_speculative_tokens", speculating(num_speculative_tokens=1024)),
    ("draft_tensor_parallel_size: NgramTreeDrafter has no", speculating(draft_tensor_parallel_size=1)),
    ("draft_tensor_parallel_size: MedusaTreeDrafter has no", speculating("medusa", draft_tensor_parallel_size=1)),
    (f"{DIVISOR}1, got 2", speculating("model", draft_tensor_parallel_size=2)),
    *(
        (f"{DIVISOR}2, got {n}", {**speculating("model", draft_tensor_parallel_size=n), "tensor_parallel_size": 2})
        for n in (3, 4)
    ),
    # A drafter named by the method of one runner does not run on the other.
    *(
        (f"{METHOD_OF}{runner} = {right}, got {wrong}", {**speculating(method=wrong), "env": {USES_V2: value}})
        for runner, value, right, wrong in (
            ("V2", "1", "ngram_gpu", "custom_class"),
            ("V1", "0", "custom_class", "ngram_gpu"),
        )
    ),
    # Names that are mistyped, and one that is imported there and takes other arguments.
    *(
        (rf"speculative_config\.model.*{re.escape(name)}", speculating(model=name))
        for name in (
            f"{DRAFTERS}NgramTreeDraftr",
            f"{DRAFTERS}NgramDrafter",
            "pagedtree.integration.vllm.drafters.NgramTreeDrafter",
        )
    ),
]
REFUSED += of_runner(
    [
        ("logprobs_mode", {**NGRAMS, "logprobs_mode": "processed_logits"}),
        ("max_logprobs", {**NGRAMS, "logprobs_mode": "processed_logprobs", "max_logprobs": -1}),
    ],
    # V2 gives log-probabilities in every mode, and must not be asked to choose nodes.
    [
        ("expected tree = \"whole\", got 'auto'", tree_options("ngram", tree="auto")),
        ("enable_batch_sharded_sampling", {**NGRAMS, "enable_batch_sharded_sampling": True, "tensor_parallel_size": 2}),
    ],
)


@pytest.mark.parametrize(("message", "options"), REFUSED)
def test_unsupported_configurations_are_refused(message, options):
    with pytest.raises(Exception, match=message):
        start(**options)


def test_the_log_names_worker_backend_and_drafter(caplog):
    log = logging.getLogger("vllm.pagedtree")  # vLLM's own handler is on "vllm", which does not hand records on
    log.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger=log.name):
            start(**tree_options("ngram"))
    finally:
        log.removeHandler(caplog.handler)
    for name in (
        f"model runner {RUNNER}",
        "worker.TreeCPUWorker",
        "attention.PagedTreeBackend",
        "drafters.NgramTreeDrafter",
    ):
        assert name in caplog.text


WRONG_PROPOSALS = {
    "expected a proposal for each of 1 requests, got 0": [],
    "at most 15 draft tokens, got 16": [([1] * 16, np.arange(-1, 16))],
    "expected 3 parents": [([1, 2], np.array([-1, 0]))],
    "got \\[-1, 2, 1\\]": [([1, 2], np.array([-1, 2, 1]))],
    "got \\[0, 0\\]": [([1], np.array([0, 0]))],
}


@pytest.mark.parametrize("message", WRONG_PROPOSALS)
def test_a_drafter_that_returns_something_else_is_named(message, monkeypatch):
    monkeypatch.setattr(NgramTreeDrafter, "draft", lambda self, request_ids, tokens: WRONG_PROPOSALS[message])
    drafter = NgramTreeDrafter.__new__(NgramTreeDrafter)
    drafter.max_nodes = 16
    with pytest.raises(ValueError, match=f"NgramTreeDrafter.draft: .*{message}"):
        drafter._checked(drafter.draft([], []), 1)
