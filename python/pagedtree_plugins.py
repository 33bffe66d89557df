"""The entry points of vLLM and SGLang, which they call in every process of an environment that has pagedtree.

They register names and import nothing of `pagedtree`. An engine's objects change only if its configuration names
pagedtree, or if the environment variable PAGEDTREE_PLUGINS (comma-separated) names the engine.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["check", "sglang", "vllm", "vllm_platform"]

VARIABLE = "PAGEDTREE_PLUGINS"
ENGINES = ("vllm", "sglang")
OF_VLLM = "pagedtree.integrations.vllm."


def vllm() -> None:
    """Registers the attention backend as CUSTOM (vllm.general_plugins). With PAGEDTREE_PLUGINS=vllm vLLM also takes
    more request options with draft trees (`limits.extend_requests`). Idempotent.

    Raises ValueError if the configuration names a drafter of pagedtree without the variable.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    is_asked = _is_asked("vllm")
    if is_asked:
        from pagedtree.integrations.vllm.limits import extend_requests

        extend_requests()
    elif _names_drafter():
        check()
    if is_asked or not AttentionBackendEnum.CUSTOM.is_overridden():  # unless it is another plugin's
        register_backend(AttentionBackendEnum.CUSTOM, f"{OF_VLLM}attention.PagedTreeBackend")


def check() -> None:
    """Raises ValueError unless PAGEDTREE_PLUGINS has vllm, for configurations with draft trees."""
    if not _is_asked("vllm"):
        raise ValueError(f"draft trees: expected {VARIABLE}=vllm in the environment, got {os.environ.get(VARIABLE)!r}")


def vllm_platform() -> str | None:
    """Names the extension of vLLM's CPU platform (vllm.platform_plugins), which ignores the choice of an attention
    backend; None without PAGEDTREE_PLUGINS=vllm and on other platforms."""
    if not _is_asked("vllm"):
        return None
    from vllm.platforms import cpu_platform_plugin

    is_cpu = cpu_platform_plugin() == "vllm.platforms.cpu.CpuPlatform"
    return f"{OF_VLLM}platform.PagedTreeCpuPlatform" if is_cpu else None


def sglang() -> None:
    """Registers the attention backend "pagedtree" (sglang.srt.plugins). SGLang's own functions change
    (`sglang.plugin.change_engine`) when the backend is made, or now with PAGEDTREE_PLUGINS=sglang."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry

    def create(runner: Any) -> Any:
        from pagedtree.integrations.sglang.attention import PagedTreeBackend
        from pagedtree.integrations.sglang.plugin import change_engine

        change_engine()
        HookRegistry.apply_hooks()
        return PagedTreeBackend(runner)

    add_attention_backend_choices(["pagedtree"])
    register_attention_backend("pagedtree")(create)
    if _is_asked("sglang"):
        from pagedtree.integrations.sglang.plugin import change_engine

        change_engine()


def _is_asked(engine: str) -> bool:
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    if unknown := {*names} - {*ENGINES, ""}:
        raise ValueError(f"{VARIABLE}: expected names among {', '.join(ENGINES)}, got {', '.join(sorted(unknown))}")
    return engine in names


def _names_drafter() -> bool:
    """Looks at the command line and at the configuration of the callers, as vLLM passes none to a plugin."""
    if any(f"{OF_VLLM}drafters." in argument for argument in sys.argv):
        return True
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        for name in ("self", "vllm_config"):  # of EngineArgs, EngineCore and the worker
            if OF_VLLM in str(getattr(frame.f_locals.get(name), "speculative_config", "")):
                return True
    return False
