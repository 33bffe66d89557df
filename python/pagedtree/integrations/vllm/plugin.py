"""The entry points, which vLLM calls first in each process."""

from __future__ import annotations

__all__ = ["platform", "register"]


def register() -> None:
    """Registers the attention backend as CUSTOM (vllm.general_plugins), and accepts more request options.
    Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pagedtree.integrations.vllm.limits import lift_refusals

    lift_refusals()
    register_backend(AttentionBackendEnum.CUSTOM, "pagedtree.integrations.vllm.attention.PagedTreeBackend")


def platform() -> str | None:
    """Names our extension of vLLM's CPU platform (vllm.platform_plugins), which ignores the choice of an attention
    backend; None on other platforms."""
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() != "vllm.platforms.cpu.CpuPlatform":
        return None
    return "pagedtree.integrations.vllm.platform.PagedTreeCpuPlatform"
