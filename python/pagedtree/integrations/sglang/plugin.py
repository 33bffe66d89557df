"""Changes SGLang's own functions, in processes whose configuration names the attention backend "pagedtree"."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def change_engine() -> None:
    """Registers hooks that add the attention backend to EAGLE's drafting steps, keep large numbers of a request from
    ending the engine, and, on CPUs, fill gaps (`on_cpu`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(factory, create_draft_backend, HookType.AROUND)
    batches = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(batches, fit_requests, HookType.AROUND)
    if is_cpu():
        from pagedtree.integrations.sglang.on_cpu import last_loc, verify_uses_greedy

        HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", last_loc, HookType.REPLACE)
        greedy = "sglang.srt.speculative.eagle_utils._verify_uses_greedy"
        HookRegistry.register(greedy, verify_uses_greedy, HookType.AROUND)


def create_draft_backend(
    original: Callable[..., Any], factory: Any, backend_name: str, backend_map: dict[str, Any], *args: Any,
    stamps_children: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Adds pagedtree to SGLang's draft backends; `stamps_children` comes with multi-step ones."""

    def create() -> tuple[str, Any]:
        from pagedtree.integrations.sglang.attention import PagedTreeBackend, PagedTreeDraftBackend

        runner = factory.draft_model_runner
        if stamps_children:
            return "pagedtree", PagedTreeDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        return "pagedtree", PagedTreeBackend(runner)

    return original(
        factory, backend_name, {**backend_map, "pagedtree": create}, *args, stamps_children=stamps_children, **options
    )


def fit_requests(original: Callable[..., Any], owner: type, batch: Any, *args: Any, **options: Any) -> Any:
    """Brings the requests' integers into the int32 of SGLang's tensors; their text stays the same."""
    for request in batch.reqs:
        for name in ("top_k", "min_new_tokens"):
            setattr(request.sampling_params, name, min(getattr(request.sampling_params, name), 2**31 - 1))
    return original(owner, batch, *args, **options)
