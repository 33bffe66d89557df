"""Fixtures that the tests of several engines share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest) -> list[list[int]]:
    """Greedy output of vLLM without us for the PROMPTS of the test's module."""
    from vllm_case import engine, generate

    with engine() as llm:
        return generate(llm, request.module.PROMPTS)
