"""Captured graphs of runner V2, on a stand-in that records and replays ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.doubles import Graph, use_stand_in
from vllm_case import (
    LLM,
    NO_TREES,
    RUNNER,
    SamplingParams,
    StructuredOutputsParams,
    accepted,
    block_options,
    engine,
    generate,
    runner_of,
    token_prompts,
    tree_options,
)

if RUNNER == "V1":
    pytest.skip("this is of model runner V2: make test-engines ENGINE=vllm_v2", allow_module_level=True)

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from pagedtree import build_trees, select_nodes
from pagedtree.integrations.vllm.attention import PagedTreeMetadataBuilder

PROMPTS = token_prompts(3)
CAPTURED = CUDAGraphMode.FULL_DECODE_ONLY  # vLLM's default where it cannot split a model


@pytest.fixture
def stand_in(monkeypatch) -> None:
    use_stand_in(monkeypatch)
    monkeypatch.setattr(cudagraph_utils, "graph_capture", lambda **kwargs: contextlib.nullcontext())
    monkeypatch.setattr(cudagraph_utils, "capture_pool", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(model_runner, "lock_workspace", lambda: None)  # a CPU's worker has none
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None, raising=False)


def capture(llm: Any, varlen: bool = False) -> None:
    """Captures as vLLM does on a GPU."""
    runner = runner_of(llm)
    config = runner.compilation_config
    support = PagedTreeMetadataBuilder.get_cudagraph_support(runner.vllm_config, None)
    config.cudagraph_mode, config.max_cudagraph_capture_size = CAPTURED, 64
    config.cudagraph_capture_sizes = [16, 32, 64]
    sizes = {"kv_cache_config": runner.kv_cache_config, "max_num_reqs": runner.max_num_reqs}
    flags = {"use_v2_model_runner": True, "is_profiling": False, "piecewise_capture_available": False}
    config.resolve_cudagraph_mode_and_sizes(support, "CUSTOM", runner.decode_query_len, **sizes, **flags)
    assert config.cudagraph_mode == CAPTURED
    for layer in config.static_forward_context.values():
        layer.use_direct_call = True  # graphs hold calls of the attention op
    runner.cudagraph_manager = cudagraph_utils.ModelCudaGraphManager(
        runner.vllm_config, runner.device, CAPTURED, decode_query_len=runner.decode_query_len, varlen_decode=varlen
    )
    if runner.speculator is not None:
        runner.speculator.init_cudagraph_manager(CAPTURED)
    runner.capture_model()
    assert runner.cudagraph_manager.graphs


@pytest.mark.parametrize("drafter", ["ngram", "medusa"])
def test_replayed_graphs_see_each_steps_trees(stand_in, drafter):
    """A graph for four replays three requests, two and one; prompts run without one."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (24, 16, 9)]
    with engine() as llm:
        expected = generate(llm, PROMPTS, params)
    with engine(**tree_options(drafter)) as llm:
        capture(llm)
        assert generate(llm, PROMPTS, params) == expected
        assert Graph.replays > 5
        if drafter == "medusa":  # a graph reads only captured buffers
            masks = runner_of(llm)._masks
            masks.num_reqs = None  # the builder's
            runner_of(llm)._masks = replace(masks, tree_mask=masks.tree_mask.clone(), tree_lens=masks.tree_lens.clone())
            assert generate(llm, PROMPTS, params) != expected


def test_a_captured_block_drafter(stand_in, tmp_path):
    """vLLM captures the pass together with the making of trees."""
    with engine() as llm:
        expected = generate(llm, PROMPTS)
    with engine(**block_options(tmp_path), **NO_TREES) as llm:
        eager = generate(llm, PROMPTS)
        guessed = accepted(llm)
        capture(llm)
        assert eager == generate(llm, PROMPTS) == expected
        assert accepted(llm) == 2 * guessed
        assert runner_of(llm).speculator.query_cudagraph_manager.graphs


@pytest.fixture
def adaptive(stand_in, monkeypatch) -> dict[str, Any]:
    """vLLM's adaptive verification refuses to run without graphs."""
    monkeypatch.setattr(VllmConfig, "_validate_adaptive_verification", lambda config: None)
    monkeypatch.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **available: mode)
    options = tree_options("medusa")
    options["speculative_config"]["enable_adaptive_verification"] = True
    return options


@contextlib.contextmanager
def priced_engine(**options: Any) -> Iterator[LLM]:
    """Rows cost more from the 20th on, which vLLM would measure on a GPU."""
    with engine(**options) as llm, pytest.MonkeyPatch.context() as patch:
        manager = runner_of(llm).adaptive_verification
        patch.setattr(manager, "batches_to_profile", lambda sizes: [])
        patch.setattr(manager, "set_initial_cost_curves", lambda timings: None)
        manager.set_cost_curves([(1, 0.0), (4, 0.0)], [(1, 1.0), (20, 1.1), (21, 2.0), (64, 40.0)])
        capture(llm, varlen=True)
        yield llm
        assert Graph.replays > 5


def test_the_batch_keeps_its_best_nodes(adaptive, monkeypatch):
    """vLLM's costs determine the number of nodes, `select_nodes` the nodes."""
    reallocate, records = adaptive_verification.AdaptiveVerificationManager.reallocate_drafts, []

    def spy(manager, req_ids, idx_mapping):
        drafts = [manager._batch_budget[0][request_id] for request_id in req_ids]
        survival = manager._confidence_probs[idx_mapping].cumprod(dim=1)
        offsets, starts, budget = reallocate(manager, req_ids, idx_mapping)
        parents = runner_of(llm).speculator.parents[idx_mapping]
        sizes = torch.tensor([n + 1 for n in drafts])
        rows = torch.cat([parents[row, :size] for row, size in enumerate(sizes)])
        trees = build_trees(rows, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(), max_nodes=16, max_depth=15)
        chances = [torch.cat([torch.ones(1), survival[row, : size - 1]]) for row, size in enumerate(sizes)]
        best, _ = select_nodes(trees, torch.cat(chances), len(drafts) + budget)
        # Owners of zero-probability nodes, kept after all others, are arbitrary.
        if (torch.cat(chances) > 0).sum() >= len(drafts) + budget:
            assert best.cu_nodes.tolist() == offsets.tolist()
        records.append((offsets.diff().tolist(), budget, sum(drafts)))
        return offsets, starts, budget

    monkeypatch.setattr(adaptive_verification.AdaptiveVerificationManager, "reallocate_drafts", spy)
    with engine() as llm:
        expected = generate(llm, PROMPTS)
    with priced_engine(**adaptive) as llm:
        assert generate(llm, PROMPTS) == expected
        assert accepted(llm) > len(PROMPTS)
    assert any(0 < budget < scheduled for _, budget, scheduled in records)
    assert any(len(set(sizes)) > 1 for sizes, _, _ in records)


def test_options_of_trees_that_were_trimmed(adaptive):
    """Grammar masks and log-probabilities follow the remaining rows."""
    params = [
        SamplingParams(
            temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,9} = .*")
        ),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=0.8, logprobs=1),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, bad_words=["the name", "#"]),
    ]
    found = []
    for settings in ({}, adaptive):
        with (priced_engine if settings else engine)(**settings) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        found.append([(list(out.token_ids), out.logprobs) for (out,) in (output.outputs for output in outputs)])
    for (tokens, logprobs), (stock_tokens, stock_logprobs) in zip(*reversed(found), strict=True):
        assert tokens == stock_tokens
        for position, theirs in enumerate(stock_logprobs or ()):
            ours = logprobs[position]
            assert {token: entry.rank for token, entry in ours.items()} == {t: e.rank for t, e in theirs.items()}
            assert all(abs(ours[token].logprob - theirs[token].logprob) < 1e-3 for token in theirs)


def test_a_drafter_without_probabilities_is_refused(adaptive):
    adaptive["speculative_config"]["model"] = "pagedtree.integrations.vllm.drafters.NgramTreeDrafter"
    adaptive["additional_config"] = {}
    with pytest.raises(Exception, match="enable_adaptive_verification: expected a drafter"), engine(**adaptive):
        pass
