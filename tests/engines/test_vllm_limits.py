"""Unsupported options are refused by name."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_case import (
    DRAFT,
    LLM,
    NO_TREES,
    RUNNER,
    TARGET,
    SamplingParams,
    VLLMValidationError,
    engine,
    generate,
    of_runner,
    token_prompts,
    tree_options,
)

from pagedtree.integrations.vllm import drafters
from pagedtree.integrations.vllm.attention import PagedTreeBackend, PagedTreeMetadataBuilder, TreeMask
from pagedtree.integrations.vllm.drafters import NgramTreeDrafter
from pagedtree.integrations.vllm.limits import ASYNC_SCHEDULER, SCHEDULER, check_request
from pagedtree.integrations.vllm.verification import target_groups

REQUESTS = {"logprob_token_ids": dict(logprob_token_ids=[5, 6]), "min_p": dict(extra_args={"min_p": 1.5})}


def test_unsupported_requests_are_refused_and_the_engine_lives():
    prompts = token_prompts(2)
    with engine(**tree_options("ngram")) as llm:
        expected = generate(llm, prompts)
        for name, options in REQUESTS.items():
            with pytest.raises(VLLMValidationError, match=name):
                generate(llm, prompts, SamplingParams(temperature=0.5, **options))
        assert generate(llm, prompts) == expected


def test_engines_of_one_process_keep_their_own_rules():
    params = SamplingParams(temperature=0.5, max_tokens=2, **REQUESTS["logprob_token_ids"])
    prompts, env = token_prompts(2), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with engine(env=env) as before, engine(**tree_options("ngram"), env=env) as llm, engine(env=env) as behind:
        for other in (before, behind):
            generate(other, prompts, params)
        with pytest.raises(VLLMValidationError, match="logprob_token_ids"):
            generate(llm, prompts, params)
        assert len(generate(llm, prompts)) == 2


@pytest.mark.parametrize("name", ["thinking_token_budget", "trace_decode_token_ids"])
def test_refuses_unsupported_request_fields_by_name(name):
    params = SamplingParams()
    setattr(params, name, [3] if name.endswith("ids") else 3)
    with pytest.raises(ValueError, match=f"draft trees: {name}: expected None"):
        check_request(params)


def start(**options) -> LLM:
    with engine(**options) as llm:
        return llm


def speculating(drafter: str = "ngram", **changes) -> dict[str, Any]:
    options = tree_options(drafter)
    options["speculative_config"].update(changes)
    return options


NGRAMS = tree_options("ngram")
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
    ("head_size", {**NGRAMS, "hf_overrides": {"head_dim": 48}}),
    ("attention_chunk_size", {**NGRAMS, "hf_overrides": {"attention_chunk_size": 32}}),
    ("kv_sharing_fast_prefill", {**NGRAMS, "kv_sharing_fast_prefill": True}),
    ("cannot load model = '/no/such'", tree_options("model", model="/no/such")),
    ("worker_cls", {**NGRAMS, "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}),
    ("logits_processors", {**NO_TREES, "logits_processors": [PROCESSOR]}),
    ("method", {**NO_TREES, "speculative_config": DRAFT_MODEL}),
    ("max_branchs", tree_options("ngram", max_branchs=2)),
    ("expected the entry model", {**tree_options("model"), "additional_config": {}}),
    ("num_speculative_tokens", speculating(num_speculative_tokens=1024)),
    ("draft_tensor_parallel_size: NgramTreeDrafter has no", speculating(draft_tensor_parallel_size=1)),
    ("draft_tensor_parallel_size: MedusaTreeDrafter has no", speculating("medusa", draft_tensor_parallel_size=1)),
    (f"{DIVISOR}1, got 2", speculating("model", draft_tensor_parallel_size=2)),
    (f"{DIVISOR}2, got 3", {**speculating("model", draft_tensor_parallel_size=3), "tensor_parallel_size": 2}),
    # One runner's method does not run on the other.
    *(
        (f"{METHOD_OF}{runner}: expected {right}, got {wrong}", {**speculating(method=wrong), "env": {USES_V2: value}})
        for runner, value, right, wrong in (
            ("V2", "1", "ngram_gpu", "custom_class"),
            ("V1", "0", "custom_class", "ngram_gpu"),
        )
    ),
    # Mistyped names, and one with other arguments.
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
    # V2 has log-probabilities in every mode, but no choice of nodes.
    [
        ("expected tree = \"whole\", got 'auto'", tree_options("ngram", tree="auto")),
        ("enable_batch_sharded_sampling", {**NGRAMS, "enable_batch_sharded_sampling": True, "tensor_parallel_size": 2}),
    ],
)


@pytest.mark.parametrize(("message", "options"), REFUSED)
def test_unsupported_configurations_are_refused(message, options):
    with pytest.raises(Exception, match=message):
        start(**options)


def test_installed_logits_processors_are_refused(tmp_path, monkeypatch):
    (info := tmp_path / "only_five-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: only-five\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.logits_processors]\nonly_five = only_five:OnlyFive\n")
    monkeypatch.syspath_prepend(tmp_path)
    for options in (NGRAMS, {**NO_TREES, **tree_options(None), "scheduler_cls": of_runner(SCHEDULER, ASYNC_SCHEDULER)}):
        with pytest.raises(ValueError, match=r"installed vllm.logits_processors: .*only_five:OnlyFive"):
            start(**options)


def test_layers_whose_batches_vllm_changes_are_refused():
    """vLLM's wrappers build another batch for such layers, here of chunks."""
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend

    wrapped = create_chunked_local_attention_backend(PagedTreeBackend, 32)
    groups = [[SimpleNamespace(backend=wrapped, layer_names=["0"])]]
    with pytest.raises(ValueError, match="PagedTreeBackend itself, got ChunkedLocalAttention_32_PagedTreeBackend"):
        target_groups(groups, {"0": None}, None)
    builder = PagedTreeMetadataBuilder.__new__(PagedTreeMetadataBuilder)
    builder.tree = TreeMask(torch.zeros(8, 1, dtype=torch.int32), torch.full((4,), -1, dtype=torch.int32), 2)
    batch = {"num_actual_tokens": 3, "query_start_loc": torch.arange(4), "seq_lens": torch.ones(3), "causal": True}
    with pytest.raises(RuntimeError, match="expected 2 requests as in the batch, got 3"):
        builder.build(0, SimpleNamespace(**batch))


WRONG_OPTIONS = [
    ("Ngram", None, "a dictionary of options, got None"),
    ("Ngram", ["max_branches"], "a dictionary"),
    ("Ngram", {"max_branches": 0}, "max_branches in 1..1024, got 0"),
    ("Ngram", {"max_branches": True}, "max_branches in 1..1024, got True"),
    ("Ngram", {"max_depth": 0}, "max_depth in 1..1023"),
    ("Ngram", {"min_ngram": 5, "max_ngram": 2}, "min_ngram <= max_ngram"),
    ("Ngram", {"max_ngram": 65}, "max_ngram in 1..64"),
    ("Ngram", {"tree": []}, "tree = "),
    ("Model", {"model": DRAFT, "depth": "4"}, "depth in 1..1023, got '4'"),
    ("Model", {"model": DRAFT, "width": None}, "width in 1..1024, got None"),
    ("Model", {"model": DRAFT, "depth": 30, "width": 40}, "width < 1024"),
    ("Medusa", {"heads": "/no/such"}, "heads to be a folder, got '/no/such'"),
    ("Eagle", {"head": 4}, "the entry head, a folder, got 4"),
    ("Eagle", {"head": DRAFT, "width": 0}, "width in 1..1024, got 0"),
    ("Folder", {"drafter": DRAFT, "depth": -1}, "depth in 1..1023, got -1"),
]


@pytest.mark.parametrize(("drafter", "options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_refused_at_the_start(drafter, options, message):
    config = SimpleNamespace(additional_config={"pagedtree": options}, use_v2_model_runner=RUNNER == "V2")
    with pytest.raises(ValueError, match=rf'additional_config\["pagedtree"\]: expected .*{message}'):
        getattr(drafters, f"{drafter}TreeDrafter").options_of(config)
    config.additional_config = {"other": {}, "Paged_Tree": {}}
    with pytest.raises(ValueError, match="expected pagedtree as the section's name, got Paged_Tree"):
        NgramTreeDrafter.options_of(config)


def test_the_log_names_worker_backend_and_drafter(caplog):
    # vLLM's handler is on "vllm", which does not propagate records.
    logs = [logging.getLogger(name) for name in ("vllm.pagedtree", "vllm.v1.sample.logits_processor")]
    with contextlib.ExitStack() as stack:
        for log in logs:
            log.addHandler(caplog.handler)
            stack.callback(log.removeHandler, caplog.handler)
            stack.enter_context(caplog.at_level(logging.INFO, logger=log.name))
        start(**tree_options("ngram"))
    assert "min_p and logit_bias" not in caplog.text  # both work
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
    "expected a proposal for each of 1 requests, got NoneType": None,
    "expected \\(draft_tokens, parents\\)": [None],
    "draft_tokens: expected integers": [([4.5], np.array([-1, 0]))],
    "parents: expected integers": [([4], np.array([-1.0, 0.0]))],
    "draft tokens in 0..2047, got \\[2048\\]": [([2048], [-1, 0])],
    "draft tokens in 0..2047, got \\[-1\\]": [([-1], [-1, 0])],
    "draft_tokens: expected integers, got \\[1180": [([2**70], [-1, 0])],
    "2 log-probabilities": [([4], [-1, 0], [0.0])],
    "2 log-probabilities, the root's included, got \\[ 0. nan\\]": [([4], [-1, 0], [0.0, np.nan])],
    "log_probs: expected numbers": [([4], [-1, 0], ["a", "b"])],
}


@pytest.mark.parametrize("message", WRONG_PROPOSALS)
def test_a_drafter_that_returns_something_else_is_named(message, monkeypatch):
    monkeypatch.setattr(NgramTreeDrafter, "draft", lambda self, request_ids, tokens: WRONG_PROPOSALS[message])
    drafter = NgramTreeDrafter.__new__(NgramTreeDrafter)
    drafter.max_nodes, drafter.vocab_size = 16, 2048
    with pytest.raises(ValueError, match=f"NgramTreeDrafter.draft: .*{message}"):
        drafter._checked(drafter.draft([], []), 1)
    answer = drafter._checked([((np.int64(4), 5), torch.tensor([-1, 0, 0]), [0, -1, -2])], 1)[0]
    assert answer.tokens == [4, 5] and {*map(type, answer.tokens)} == {int}
    assert (answer.parents.dtype, answer.log_probs.dtype) == (np.int32, np.float32)


def test_a_drafter_cannot_change_a_text(monkeypatch):
    monkeypatch.setattr(NgramTreeDrafter, "on_device", False)
    monkeypatch.setattr(NgramTreeDrafter, "draft", lambda self, request_ids, tokens: tokens[0].sort())
    with engine(**NGRAMS) as llm, pytest.raises(RuntimeError, match=r"NgramTreeDrafter.draft: .*read-only"):
        generate(llm, token_prompts(2))


# ---- without draft trees an engine is vLLM's own

PROGRAM = Path(__file__).parent / "untouched.py"
GROUPS = "vllm.general_plugins", "vllm.platform_plugins"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **variables}
    del env["PAGEDTREE_PLUGINS"]
    return subprocess.run([sys.executable, PROGRAM, "vllm", *arguments], capture_output=True, text=True, env=env)


def test_installed_plugins_change_nothing():
    others = {entry.name for group in GROUPS for entry in entry_points(group=group)} - {"pagedtree"}
    installed, missing = run(), run(VLLM_PLUGINS=",".join(["none", *others]))
    assert installed.returncode == missing.returncode == 0, installed.stderr + missing.stderr
    assert installed.stdout.splitlines()[-1] == "[]"
    assert installed.stdout == missing.stdout


def test_drafter_without_the_variable_is_refused():
    options = {"model": TARGET, "dtype": "float32", "enforce_eager": True, "max_model_len": 512, **tree_options()}
    done = run(json.dumps(options))
    assert done.returncode != 0
    assert "expected PAGEDTREE_PLUGINS=vllm in the environment, got None" in done.stderr
