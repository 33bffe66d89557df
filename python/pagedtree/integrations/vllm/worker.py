"""vLLM's workers with `runner.TreeRunner`, on model runner V2 with `runner_v2.TreeRunnerV2`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from pagedtree.integrations.vllm.limits import check_config
from pagedtree.integrations.vllm.runner import TreeRunner


@contextmanager
def _true_log() -> Iterator[None]:
    """Drops a warning of vLLM's that does not hold with draft trees."""
    log = logging.getLogger("vllm.v1.sample.logits_processor")

    def is_true(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("min_p and logit_bias parameters won't work")

    log.addFilter(is_true)
    yield
    log.removeFilter(is_true)


class TreeCPUModelRunner(TreeRunner, CPUModelRunner):
    pass


class TreeGPUModelRunner(TreeRunner, GPUModelRunner):
    pass


class TreeCPUWorker(CPUWorker):
    """worker_cls on CPUs, which the platform plugin sets."""

    @_true_log()
    def init_device(self) -> None:
        check_config(self.vllm_config)
        super().init_device()
        # The CPU worker makes its runner in the middle of this method, before a model is loaded.
        if self.vllm_config.use_v2_model_runner:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2

            self.model_runner = _with_trees(CPUModelRunnerV2)(self.vllm_config, self.device)
        else:
            self.model_runner = TreeCPUModelRunner(self.vllm_config, torch.device("cpu"))


class TreeGPUWorker(Worker):
    """worker_cls on GPUs."""

    @_true_log()
    def _make_model_runner(self) -> Any:
        check_config(self.vllm_config)
        if self.vllm_config.use_v2_model_runner:
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

            return _with_trees(GPUModelRunnerV2)(self.vllm_config, self.device)
        return TreeGPUModelRunner(self.vllm_config, self.device)


def _with_trees(runner: type) -> type:
    """Puts `TreeRunnerV2` before a model runner V2, whose modules need Triton."""
    from pagedtree.integrations.vllm.runner_v2 import TreeRunnerV2

    return type(f"Tree{runner.__name__}V2", (TreeRunnerV2, runner), {})
