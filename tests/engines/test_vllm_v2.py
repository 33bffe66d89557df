"""Runner V2 schedules steps before results are known and keeps everything on the device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_case import (
    RUNNER,
    SamplingParams,
    StructuredOutputsParams,
    TreeRunner,
    accepted,
    engine,
    generate,
    runner_of,
    token_prompts,
    tree_options,
)

if RUNNER == "V1":
    pytest.skip("this is of model runner V2: make test-engines ENGINE=vllm_v2", allow_module_level=True)

from vllm.v1.worker.gpu.warmup import warmup_kernels

from pagedtree.integrations.vllm import speculator
from pagedtree.integrations.vllm.async_scheduler import AsyncTreeScheduler

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
    with engine(max_num_seqs=5) as llm:
        expected = generate(llm, prompts, params)
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
    with engine(max_num_seqs=8) as llm:
        expected = generate(llm, prompts, params)
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
    with engine() as llm:
        expected = generate(llm, prompts)
    with engine(**tree_options("ngram"), block_size=16, enable_prefix_caching=True, max_num_seqs=2) as llm:
        assert generate(llm, prompts) == expected
    assert any(padded)


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
