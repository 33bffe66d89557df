"""The entry points: what vLLM calls in each of its processes before it does anything else."""

from __future__ import annotations

__all__ = ["platform", "register"]


def register() -> None:
    """vllm.general_plugins: the attention backend is known as CUSTOM, and requests reach trees with all their options.

    May be called any number of times.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pagedtree.integrations.vllm.limits import lift_refusals

    lift_refusals()
    register_backend(AttentionBackendEnum.CUSTOM, "pagedtree.integrations.vllm.attention.PagedTreeBackend")


def platform() -> str | None:
    """vllm.platform_plugins: where vLLM runs on CPUs, names our extension of its platform; elsewhere none.

    vLLM's CPU platform ignores the choice of an attention backend. On a GPU it is heeded without our help.
    """
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() != "vllm.platforms.cpu.CpuPlatform":
        return None
    return "pagedtree.integrations.vllm.platform.PagedTreeCpuPlatform"
