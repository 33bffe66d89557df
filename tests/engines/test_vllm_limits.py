"""What draft trees do not support is refused by name, at the start or when the request is made."""

from __future__ import annotations

import logging

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


CONFIGURATIONS = {
    "pipeline_parallel_size": dict(pipeline_parallel_size=2),
    "enable_lora": dict(enable_lora=True),
    "attention_backend": dict(attention_backend="CPU_ATTN"),
    "logprobs_mode": dict(logprobs_mode="processed_logits"),
    "max_logprobs": dict(logprobs_mode="processed_logprobs", max_logprobs=-1),
    "scheduler_cls": dict(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"),
    "head_size": dict(hf_overrides={"head_dim": 32}),
}
if RUNNER == "V2":  # which gives log-probabilities in every mode, and must not be asked to choose nodes
    del CONFIGURATIONS["logprobs_mode"], CONFIGURATIONS["max_logprobs"]
    CONFIGURATIONS["expected tree = \"whole\", got 'auto'"] = dict(additional_config={"pagedtree": {"tree": "auto"}})
    CONFIGURATIONS["enable_batch_sharded_sampling"] = dict(enable_batch_sharded_sampling=True, tensor_parallel_size=2)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_unsupported_configurations_are_refused(name):
    with pytest.raises(Exception, match=name):
        start(**{**tree_options("ngram"), **CONFIGURATIONS[name]})


@pytest.mark.parametrize(
    ("name", "drafter", "speculation"),
    [
        ("draft_tensor_parallel_size", "ngram", {"draft_tensor_parallel_size": 1}),
        ("draft_tensor_parallel_size: expected a divisor of tensor_parallel_size = 1, got 2", "model",
         {"draft_tensor_parallel_size": 2}),
        ("draft_tensor_parallel_size: MedusaTreeDrafter has no", "medusa", {"draft_tensor_parallel_size": 1}),
        ("num_speculative_tokens", "ngram", {"num_speculative_tokens": 1024}),
    ],
)  # fmt: skip
def test_unsupported_speculation_is_refused(name, drafter, speculation):
    options = tree_options(drafter)
    options["speculative_config"].update(speculation)
    with pytest.raises(Exception, match=name):
        start(**options)


@pytest.mark.parametrize("size", [3, 4])
def test_draft_ranks_that_do_not_divide_the_targets_are_refused(size):
    options = tree_options("model")
    options["speculative_config"]["draft_tensor_parallel_size"] = size
    message = f"draft_tensor_parallel_size: expected a divisor of tensor_parallel_size = 2, got {size}"
    with pytest.raises(Exception, match=message):
        start(**options, tensor_parallel_size=2)


def test_draft_tensor_parallel_size_of_one_is_honoured():
    options = tree_options("model")
    options["speculative_config"]["draft_tensor_parallel_size"] = 1
    with engine(**options) as llm:
        assert all(generate(llm, token_prompts(1)))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("max_branchs", {**tree_options("ngram"), "additional_config": {"pagedtree": {"max_branchs": 2}}}),
        ("expected tree = ", tree_options("ngram", tree="some")),
        ("expected the entry model", {**tree_options("model"), "additional_config": {}}),
        ("worker_cls", {**tree_options("ngram"), "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}),
        ("logits_processors", {"worker_cls": "pagedtree.integrations.vllm.worker.TreeCPUWorker",
                               "logits_processors": ["vllm.v1.sample.logits_processor:MinPLogitsProcessor"]}),
        ("method", {"worker_cls": "pagedtree.integrations.vllm.worker.TreeCPUWorker",
                    "speculative_config": {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 2}}),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(message, options):
    with pytest.raises(Exception, match=message):
        start(**options)


@pytest.mark.parametrize(
    "name",
    [
        "pagedtree.integrations.vllm.drafters.NgramTreeDraftr",
        "pagedtree.integrations.vllm.drafters.NgramDrafter",  # imported there, takes other arguments
        "pagedtree.integration.vllm.drafters.NgramTreeDrafter",
    ],
)
def test_a_mistyped_drafter_is_refused(name):
    options = tree_options("ngram")
    options["speculative_config"]["model"] = name
    with pytest.raises(Exception, match=rf"speculative_config\.model.*{name.replace('.', '[.]')}"):
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


@pytest.mark.parametrize(
    ("message", "runner", "options"),
    [
        ("speculative_config.method on model runner V2 = ngram_gpu, got custom_class", "1", {"method": "custom_class"}),
        ("speculative_config.method on model runner V1 = custom_class, got ngram_gpu", "0", {"method": "ngram_gpu"}),
    ],
)
def test_no_other_runner_serves_in_silence(message, runner, options):
    """A drafter named by the method of one runner does not run on the other."""
    settings = tree_options("ngram")
    settings["speculative_config"].update(options)
    with pytest.raises(Exception, match=message):
        start(**settings, env={"VLLM_USE_V2_MODEL_RUNNER": runner})
