"""Runner V2 schedules steps before results are known, keeps everything on the device, and captures graphs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Graph, use_stand_in
from vllm_case import (
    LLM,
    NO_TREES,
    PREEMPTED,
    RUNNER,
    SamplingParams,
    StructuredOutputsParams,
    TreeRunner,
    accepted,
    block_options,
    engine,
    generate,
    metrics_of,
    runner_of,
    texts_of,
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
from vllm.v1.worker.gpu.warmup import warmup_kernels

from pagedtree import build_trees, select_nodes
from pagedtree.integrations.vllm import speculator
from pagedtree.integrations.vllm.async_scheduler import AsyncTreeScheduler
from pagedtree.integrations.vllm.attention import PagedTreeMetadataBuilder

PROMPTS = token_prompts(4)
# Methods that wait for a device.
WAITS = ["item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"]
OURS = str(Path(speculator.__file__).parent)
OPTIONS = dict(presence_penalty=0.5, logit_bias={5: 2.0}, bad_words=["the name"], min_tokens=3, top_k=40, logprobs=2)


def test_a_short_look():
    """CI's part of V2, in few engines."""
    greedy = {"temperature": 0, "ignore_eos": True}
    params = [SamplingParams(max_tokens=n, **greedy) for n in (11, 7, 4)]
    params.append(SamplingParams(max_tokens=6, **greedy, **OPTIONS))
    grammar = StructuredOutputsParams(regex=r"(def|class) [a-z_]{3,9}\((self|x|y)\):")
    params.append(SamplingParams(max_tokens=6, temperature=0, structured_outputs=grammar))
    prompts = token_prompts(6)[1:]
    expected = texts_of(prompts, params, max_num_seqs=5)
    for drafter in ("ngram", "eagle"):
        with engine(**tree_options(drafter, num_nodes=12), max_num_seqs=5, enable_prefix_caching=False) as llm:
            assert generate(llm, prompts, params) == expected
            assert accepted(llm) > 3


@pytest.fixture
def waits(monkeypatch) -> list[str]:
    """Records each wait for a tensor below our code."""
    found: list[str] = []

    def recorded(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def record(self, *args, **kwargs):
            frame, caller = sys._getframe(1), ""
            while frame is not None:
                caller = frame.f_code.co_filename
                if caller.startswith(OURS) and not caller.endswith(("scheduler.py", "platform.py")):
                    found.append(f"{Path(caller).name} {name}")
                    break
                frame = frame.f_back
            return method(self, *args, **kwargs)

        return record

    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, recorded(name))
    return found


@pytest.mark.parametrize("drafter", ["ngram", "medusa"])
def test_no_step_waits_for_the_device(stock, waits, drafter):
    with engine(**tree_options(drafter)) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert core.async_scheduling and isinstance(core.scheduler, AsyncTreeScheduler)
        waits.clear()
        assert generate(llm, PROMPTS) == stock
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, **OPTIONS)
        generate(llm, PROMPTS, params)
        assert accepted(llm) > len(PROMPTS)
        assert waits == []


def test_a_drafter_on_the_host_waits_once_a_step(stock, waits, monkeypatch):
    propose, steps = speculator.TreeSpeculator.propose, []

    def spy(self, *args, **kwargs):
        steps.append(len(args))
        return propose(self, *args, **kwargs)

    monkeypatch.setattr(speculator.TreeSpeculator, "propose", spy)
    with engine(**tree_options("model")) as llm:
        waits.clear()
        steps.clear()
        assert generate(llm, PROMPTS) == stock
        from_device = [wait for wait in waits if wait == "speculator.py cpu"]
        assert len(from_device) == len(steps) > 5


def test_requests_that_are_aborted_leave_the_others_alone():
    prompts = token_prompts(20)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    expected = texts_of(prompts, params, max_num_seqs=8)
    with engine(**tree_options("ngram"), max_num_seqs=8, max_num_batched_tokens=96) as llm:
        for n, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(n), {"prompt_token_ids": prompt}, params)
        found, aborted = {}, {2: "1", 4: "3", 5: "12"}  # by the number of steps; the last one waits
        for step in range(1000):
            if not llm.llm_engine.has_unfinished_requests():
                break
            for output in llm.llm_engine.step():
                if output.finished:
                    found[int(output.request_id)] = list(output.outputs[0].token_ids)
            if step in aborted:
                llm.llm_engine.abort_request([aborted[step]])
    left_out = set(map(int, aborted.values()))
    assert {n: found[n] for n in range(20) if n not in left_out} == {
        n: expected[n] for n in range(20) if n not in left_out
    }


def test_placeholders_of_short_prefills_are_no_drafts(monkeypatch):
    """A prompt whose cache lacks only the last token gets placeholders."""
    padded: list[bool] = []
    lay_out = TreeRunner._lay_out_trees

    def spy(runner, batch):
        step = lay_out(runner, batch)
        padded.append(bool((batch.is_prefilling_np & (batch.num_draft_tokens_per_req > 0)).any()))
        return step

    monkeypatch.setattr(TreeRunner, "_lay_out_trees", spy)
    prompts = [PROMPTS[1], [*range(100, 117)], [*range(100, 117)]]
    expected = texts_of(prompts)
    found = texts_of(prompts, **tree_options("ngram"), block_size=16, enable_prefix_caching=True, max_num_seqs=2)
    assert found == expected and any(padded)


def test_the_batch_bounds_the_nodes(stock):
    """vLLM's schedule by batch size keeps the first nodes of each tree."""
    options = tree_options("ngram")
    options["speculative_config"]["num_speculative_tokens_per_batch_size"] = [[1, 2, 15], [3, 4, 6]]
    with engine(**options) as llm:
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) > len(PROMPTS)


def test_the_steps_that_warm_a_gpu_up_run_with_trees(stock):
    """Warm-up has every option."""
    with engine(**tree_options("ngram")) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        warmup_kernels(runner_of(llm), worker.execute_model, worker.sample_tokens)
        assert generate(llm, PROMPTS) == stock


# ---- DFlash: trees from the guesses of vLLM's speculator


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return block_options(tmp_path_factory.mktemp("dflash"))


def test_trees_get_more_accepted_than_chains(stock, block):
    """The chain is vLLM's, on our attention backend."""
    guessed = {}
    with engine(**block, attention_backend="CUSTOM") as llm:
        assert generate(llm, PROMPTS) == stock
        guessed["chain"] = accepted(llm)
    with engine(**block, **NO_TREES) as llm:
        assert generate(llm, PROMPTS) == stock
        guessed["tree"] = accepted(llm)
    assert guessed["tree"] > guessed["chain"], guessed


@pytest.mark.parametrize(
    "schedule",
    [
        dict(max_num_batched_tokens=40, block_size=16, enable_prefix_caching=True),
        dict(PREEMPTED, enable_prefix_caching=False),
    ],
)
def test_schedules(stock, block, schedule):
    with engine(**block, **NO_TREES, **schedule) as llm:
        assert generate(llm, PROMPTS) == stock
        assert generate(llm, PROMPTS) == stock
        name = "prefix_cache_hits" if schedule["enable_prefix_caching"] else "num_preemptions"
        assert metrics_of(llm)[f"vllm:{name}"] > 0


# ---- captured graphs, on a stand-in that records and replays ops

THREE = PROMPTS[:3]
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
    expected = texts_of(THREE, params)
    with engine(**tree_options(drafter)) as llm:
        capture(llm)
        assert generate(llm, THREE, params) == expected
        assert Graph.replays > 5
        if drafter == "medusa":  # a graph reads only captured buffers
            masks = runner_of(llm)._masks
            masks.num_reqs = None  # the builder's
            runner_of(llm)._masks = replace(masks, tree_mask=masks.tree_mask.clone(), tree_lens=masks.tree_lens.clone())
            assert generate(llm, THREE, params) != expected


def test_a_captured_block_drafter(stand_in, tmp_path):
    """vLLM captures the pass together with the making of trees."""
    expected = texts_of(THREE)
    with engine(**block_options(tmp_path), **NO_TREES) as llm:
        eager = generate(llm, THREE)
        guessed = accepted(llm)
        capture(llm)
        assert eager == generate(llm, THREE) == expected
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
    expected = texts_of(THREE)
    with priced_engine(**adaptive) as llm:
        assert generate(llm, THREE) == expected
        assert accepted(llm) > len(THREE)
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
            outputs = llm.generate([{"prompt_token_ids": p} for p in THREE], params, use_tqdm=False)
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
