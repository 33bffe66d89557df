"""vLLM's DFlash speculator on runner V2, with trees from its guesses."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_case import NO_TREES, PREEMPTED, RUNNER, accepted, block_options, engine, generate, metrics_of, token_prompts

if RUNNER == "V1":
    pytest.skip("this is of model runner V2: make test-engines ENGINE=vllm_v2", allow_module_level=True)

PROMPTS = token_prompts(4)


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return block_options(tmp_path_factory.mktemp("dflash"))


def test_trees_get_more_accepted_than_chains(stock, block):
    """The chain is vLLM's, on our attention backend."""
    guessed = {}
    with engine(**block, attention_backend="CUSTOM") as llm:
        assert generate(llm, PROMPTS) == stock
        guessed["chain"] = accepted(llm)
    with engine(**block, **NO_TREES) as llm:
        assert generate(llm, PROMPTS) == stock
        guessed["tree"] = accepted(llm)
    assert guessed["tree"] > guessed["chain"], guessed


@pytest.mark.parametrize(
    "schedule",
    [
        dict(max_num_batched_tokens=40, block_size=16, enable_prefix_caching=True),
        dict(PREEMPTED, enable_prefix_caching=False),
    ],
)
def test_schedules(stock, block, schedule):
    with engine(**block, **NO_TREES, **schedule) as llm:
        assert generate(llm, PROMPTS) == stock
        assert generate(llm, PROMPTS) == stock
        name = "prefix_cache_hits" if schedule["enable_prefix_caching"] else "num_preemptions"
        assert metrics_of(llm)[f"vllm:{name}"] > 0
