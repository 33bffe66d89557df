"""The check of vLLM's worker."""

from __future__ import annotations

from typing import Any

import pagedtree_plugins
from pagedtree._arguments import refusal


def check_worker(vllm_config: Any) -> None:
    """Raises ValueError without PAGEDTREE_PLUGINS=vllm, and for vLLM's own worker: on runner V2 it would silently draft
    with vLLM's n-grams."""
    pagedtree_plugins.check()
    worker = vllm_config.parallel_config.worker_cls
    if not isinstance(worker, str) or worker == "auto" or worker.startswith("vllm."):
        wanted = "pagedtree.integrations.vllm.worker.TreeGPUWorker (on CPUs TreeCPUWorker)"
        raise refusal("draft trees: worker_cls", wanted, worker)
