"""Fixtures of several engines."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest) -> list[list[int]]:
    """Stock vLLM's output for the module's PROMPTS."""
    from vllm_case import engine, generate, runner_of

    with engine() as llm:
        assert "pagedtree" not in runner_of(llm).attn_groups[0][0].backend.__module__
        return generate(llm, request.module.PROMPTS)
