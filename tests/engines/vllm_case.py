"""Small vLLM engines, one at a time in this process; runner V2 needs triton_on_cpu."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    PAGEDTREE_PLUGINS="vllm",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)
pytest.importorskip("vllm")

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMValidationError  # noqa: F401 - tests import vLLM through this file
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams  # noqa: F401
from vllm.triton_utils import HAS_TRITON

from pagedtree.integrations.vllm.limits import METHODS

if HAS_TRITON:
    from pagedtree.integrations.vllm.runner_v2 import TreeRunnerV2 as TreeRunner
else:
    from pagedtree.integrations.vllm.runner import TreeRunner  # noqa: F401

RUNNER = "V2" if HAS_TRITON else "V1"
METHOD = METHODS[RUNNER]  # of our drafters


def of_runner(v1: Any, v2: Any) -> Any:
    """Chooses by runner, as Triton's interpreter is ten times slower."""
    return v1 if RUNNER == "V1" else v2


V1_ONLY = pytest.mark.skipif(RUNNER == "V2", reason="this is of model runner V1")
CHECKPOINTS = Path(__file__).resolve().parents[2] / "examples" / "checkpoints"
TARGET, DRAFT, MEDUSA, EAGLE = (str(CHECKPOINTS / name) for name in ("target", "draft", "medusa", "eagle"))
BLOCK = str(CHECKPOINTS / "block")
NO_TREES = {"worker_cls": "pagedtree.integrations.vllm.worker.TreeCPUWorker"}
# Caches too small for all requests, so vLLM preempts.
PREEMPTED = {"block_size": 16, "num_gpu_blocks_override": 14, "max_model_len": 160}
RANKS = {
    "tensor_parallel_size": 2,
    "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def token_prompts(count: int = 6) -> list[list[int]]:
    """Some prompts repeat themselves, some share a prefix."""
    shared = [(31 * i * i + 7) % 1900 + 50 for i in range(40)]
    prompts = []
    for n in range(count):
        middle = [(7 * i * i + 3 * n + 5) % 1900 + 50 for i in range(3 + 9 * n % 61)]
        prompts.append([0, *middle, *middle[: len(middle) // 2]] if n % 2 else [0, *shared[: 8 * n], *middle])
    return prompts


@contextlib.contextmanager
def engine(**options: Any) -> Iterator[LLM]:
    """Runs the toy's target in fp32; `env`: variables while it lives."""
    env: dict[str, str] = options.pop("env", {})
    settings: dict[str, Any] = {
        "model": TARGET,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "disable_log_stats": False,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        llm = LLM(**{**settings, **options})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()
            # Once per process: a second call fails after an import of numba.
            type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def generate(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[list[int]]:
    """By default 24 greedy tokens a prompt."""
    if params is None:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def texts_of(
    prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams] | None = None, **options: Any
) -> list[list[int]]:
    """Runs an engine for them alone."""
    with engine(**options) as llm:
        return generate(llm, prompts, params)


def prompt_logprobs(**options: Any) -> torch.Tensor:
    prompts = token_prompts()
    with engine(**options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    values = []
    for prompt, output in zip(prompts, outputs, strict=True):
        for token, logprobs in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            values.append(logprobs[token].logprob)
    return torch.tensor(values, dtype=torch.float64)


def runner_of(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def metrics_of(llm: LLM) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def expect_preemptions(llm: LLM) -> None:
    """Asserts preemptions in a cache of 14 blocks, all free at last."""
    assert metrics_of(llm)["vllm:num_preemptions"] > 0
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 13  # one is vLLM's null block


def speculation(drafter: str, num_nodes: int = 16) -> dict[str, Any]:
    return {"method": METHOD, "model": drafter, "num_speculative_tokens": num_nodes - 1}


def oracle_options(
    prompts: Sequence[list[int]], outputs: Sequence[list[int]], drafter: str = "OracleDrafter", **options: Any
) -> dict[str, Any]:
    """The drafter, of oracle_drafter.py, knows the outputs."""
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    return {
        **NO_TREES,
        "speculative_config": speculation(f"oracle_drafter.{drafter}"),
        "additional_config": {"pagedtree": {"tree": "whole", "texts": texts, **options}},
    }


def copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TARGET) / name, folder)


def saved(model: Any, folder: Path, scale: float) -> str:
    """Saves a random model; smaller embeddings let layers matter, else each token repeats itself."""
    with torch.no_grad():
        model.model.embed_tokens.weight *= scale
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return str(folder)


def block_options(folder: Path) -> dict[str, Any]:
    """vLLM's DFlash with the toy's block drafter, whose config.json lacks entries for vLLM."""
    shutil.copytree(BLOCK, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": 2048, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    return {"speculative_config": {"method": "dflash", "model": str(folder), "num_speculative_tokens": 7}}


def tree_options(drafter: str | None = "ngram", /, num_nodes: int = 16, **options: Any) -> dict[str, Any]:
    """Makes options of a tree engine, or for None of our attention backend alone.

    "model", "medusa", "eagle" and "folder" (a block drafter) are the toy's checkpoints. All nodes are verified unless
    `tree` is "auto".
    """
    if drafter is None:
        return {"attention_backend": "CUSTOM"}
    names = {"ngram": "Ngram", "model": "Model", "medusa": "Medusa", "eagle": "Eagle", "folder": "Folder"}
    module = "suffix" if drafter == "suffix" else "drafters"
    names["suffix"] = "Suffix"
    defaults = {"ngram": {}, "model": {"model": DRAFT}, "medusa": {"heads": MEDUSA}, "eagle": {"head": EAGLE}}
    defaults |= {"folder": {"drafter": BLOCK}, "suffix": {}}
    settings = {"tree": "whole", **defaults[drafter], **options}
    drafting = speculation(f"pagedtree.integrations.vllm.{module}.{names[drafter]}TreeDrafter", num_nodes)
    return {"speculative_config": drafting, "additional_config": {"pagedtree": settings}}


def accepted(llm: LLM) -> float:
    return metrics_of(llm)["vllm:spec_decode_num_accepted_tokens"]
