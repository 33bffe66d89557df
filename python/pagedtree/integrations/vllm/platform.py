"""vLLM's CPU platform with pagedtree's attention backend and draft trees."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from pagedtree._arguments import refusal
from pagedtree.integrations.vllm.limits import avoid_rotary_op, check_config, scheduler_of, uses_trees

logger = init_logger("vllm.pagedtree")  # below the logger that vLLM sets up

LATENT_BACKEND = "pagedtree.integrations.vllm.latent.PagedTreeLatentBackend"


class PagedTreeCpuPlatform(CpuPlatform):
    """The CPU platform, changed only where pagedtree is requested."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: AttentionBackendEnum, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        path = LATENT_BACKEND if attn_selector_config.use_mla else selected_backend.get_path()
        backend = resolve_obj_by_qualname(path)
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"attention_backend CUSTOM ({backend.__name__}): {', '.join(reasons)}")
        logger.info_once("pagedtree: attention backend CUSTOM (%s)", path)
        return path

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Sets worker, scheduler and attention backend if one of our drafters is configured."""
        attention, parallel = vllm_config.attention_config, vllm_config.parallel_config
        scheduler = vllm_config.scheduler_config
        has_trees = vllm_config.model_config is not None and uses_trees(vllm_config)
        if has_trees:
            if attention.backend not in (None, AttentionBackendEnum.CUSTOM):
                raise refusal("draft trees: attention_backend", "CUSTOM", attention.backend.name)
            attention.backend = AttentionBackendEnum.CUSTOM
            if parallel.worker_cls == "auto":
                parallel.worker_cls = "pagedtree.integrations.vllm.worker.TreeCPUWorker"
        is_async = scheduler.async_scheduling
        if attention.backend == AttentionBackendEnum.CUSTOM and vllm_config.model_config is not None:
            avoid_rotary_op(vllm_config)
        super().check_and_update_config(vllm_config)
        if has_trees:
            if vllm_config.use_v2_model_runner:
                # vLLM's platform switches it off, which a CPU has no need of. With trees all devices run the same way.
                scheduler.async_scheduling = is_async
            if scheduler.scheduler_cls is None:
                scheduler.scheduler_cls = scheduler_of(vllm_config)
            check_config(vllm_config)
