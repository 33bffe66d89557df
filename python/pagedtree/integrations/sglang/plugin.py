"""The entry point: what SGLang calls in each of its processes before it does anything else."""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "pagedtree"


def register() -> None:
    """sglang.srt.plugins: makes the attention backend known, --attention-backend pagedtree."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    def create(runner: Any) -> Any:
        from pagedtree.integrations.sglang.attention import PagedTreeBackend

        return PagedTreeBackend(runner)

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)
