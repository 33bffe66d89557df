"""Sliding windows, layers of two kinds with softcap, tensor-parallel ranks, and the documented drafters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ROOT, python_blocks
from vllm_case import (
    MEDUSA,
    NO_TREES,
    RANKS,
    accepted,
    engine,
    generate,
    of_runner,
    runner_of,
    saved,
    speculation,
    texts_of,
    token_prompts,
    tree_options,
)

PROMPTS = token_prompts()
WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}


def test_sliding_windows():
    """The window is shorter than the prompts, and depth determines a node's position."""
    unlimited = texts_of(PROMPTS)
    expected = texts_of(PROMPTS, hf_overrides=WINDOW)
    assert expected != unlimited
    for options in ({"attention_backend": "CUSTOM"}, tree_options("model")):
        assert texts_of(PROMPTS, **options, hf_overrides=WINDOW, block_size=16) == expected


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Gemma 2 with windows in every second layer has two groups of caches."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    folder = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(0)
    sizes = dict(vocab_size=2048, hidden_size=256, intermediate_size=256, num_hidden_layers=4, initializer_range=0.3)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, sliding_window=24)
    ends = dict(max_position_embeddings=1024, bos_token_id=0, eos_token_id=1)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, **ends, attn_logit_softcapping=5.0))
    return saved(model, folder, 0.03)


def test_two_groups_of_caches_and_softcap(gemma):
    expected = texts_of(PROMPTS, model=gemma)
    assert all(len(set(output)) > 2 for output in expected)
    # The target drafts itself, so whole paths are accepted.
    for options in ({"attention_backend": "CUSTOM"}, tree_options("model", model=gemma)):
        with engine(model=gemma, **options, block_size=16) as llm:
            assert len(runner_of(llm).kv_cache_config.kv_cache_groups) == 2
            assert generate(llm, PROMPTS) == expected
            if "speculative_config" in options:
                assert accepted(llm) > 12 * len(PROMPTS)


@pytest.mark.parametrize(
    ("drafter", "draft_ranks", "tree"),
    [
        *((drafter, None, "whole") for drafter in ("ngram", "medusa", "eagle")),
        ("model", 2, "whole"),
        *of_runner(
            [("model", None, "whole"), ("model", 1, "whole"), *((x, None, "auto") for x in ("medusa", "eagle"))], []
        ),
    ],
)
def test_two_tensor_parallel_ranks(drafter, draft_ranks, tree):
    """The first rank drafts for both, or they share the draft model."""
    expected = texts_of(PROMPTS)
    options = tree_options(drafter, tree=tree)
    options["speculative_config"]["draft_tensor_parallel_size"] = draft_ranks
    with engine(**options, **RANKS, enable_prefix_caching=False) as llm:
        assert generate(llm, PROMPTS) == expected
        assert tree == "auto" or accepted(llm) > len(PROMPTS)


# ---- the drafters of docs/integrations/vllm.md

BLOCKS = python_blocks(ROOT / "docs" / "integrations" / "vllm.md")
OPTIONS: dict[str, dict[str, Any]] = {
    "RepeatDrafter": {"tree": "whole", "most": 3},
    "HeadsDrafter": {"tree": "whole", "heads": MEDUSA},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_drafters_of_the_page_draft(name, tmp_path, monkeypatch):
    """A drafter is a module, named in the configuration with the worker."""
    (block,) = (block for block in BLOCKS if f"class {name}(" in block)
    (tmp_path / f"my_{name}.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts = [*token_prompts(2), [7] * 20]
    expected, drafting = texts_of(prompts), speculation(f"my_{name}.{name}")
    config = {"pagedtree": OPTIONS[name]}
    with engine(**NO_TREES, speculative_config=drafting, additional_config=config) as llm:
        assert generate(llm, prompts) == expected
        assert accepted(llm) > 0


def test_every_block_of_the_page_is_run():
    assert len(BLOCKS) == len(OPTIONS)
