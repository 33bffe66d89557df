"""Lets SGLang's CUDA graph runners run on CPU tensors: `support.doubles.Graph` records the ops and replays them."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from support.doubles import Graph, Recording

from pagedtree._ops import Prepared
from pagedtree.integrations.sglang import TreeMaskMode


def capture_decode_graph(*, model_runner: Any) -> Any:
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

    runner = None if model_runner.is_draft_worker else DecodeCudaGraphRunner(model_runner)
    return GraphCapture(runner=runner, memory_phase="decode", memory_usage_gb=0, capture_time=0)


def capture_drafts(original: Any, worker: Any) -> None:
    from sglang.srt.speculative import eagle_worker_v2

    with patch.object(eagle_worker_v2, "_is_cpu", False), patch.object(worker.target_worker, "device", "cuda"):
        original(worker)


def replay(original: Any, backend: Any, key: Any, *args: Any, **options: Any) -> Any:
    """Notes the graph's mode and size and the number of requests."""
    runner = backend._cuda_graph_runner
    with open(os.environ["CAPTURED_GRAPHS"], "a") as file:
        print(runner.capture_forward_mode.name, key.size, runner.raw_bs, file=file)
    return original(backend, key, *args, **options)


def install() -> None:
    del Prepared.__del__  # a replay needs no prepared call
    torch.cuda.CUDAGraph = Graph
    torch.cpu.graph = Recording
    torch.cpu.graph_pool_handle = torch.cpu.is_current_stream_capturing = lambda: None
    executor, drafting = "sglang.srt.model_executor", "sglang.srt.speculative"
    for path, hook, kind in (
        (f"{executor}.model_runner_components.cuda_graph_setup.capture_decode_graph", capture_decode_graph, "REPLACE"),
        (f"{executor}.forward_batch_info.ForwardMode.is_cpu_graph", lambda _, mode: mode.is_cuda_graph(), "AROUND"),
        (f"{executor}.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.replay", replay, "AROUND"),
        (f"{drafting}.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs", capture_drafts, "AROUND"),
        (f"{drafting}.eagle_utils.default_tree_mask_mode", lambda: TreeMaskMode.FULL_MASK, "REPLACE"),  # as on CUDA
    ):
        HookRegistry.register(path, hook, HookType[kind])
