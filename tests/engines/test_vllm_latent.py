"""Latent attention, as latents or ordinary heads, produces stock vLLM's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_case import (
    NGRAM,
    RANKS,
    V1_ONLY,
    accepted,
    engine,
    generate,
    metrics_of,
    of_runner,
    oracle_options,
    prompt_logprobs,
    runner_of,
    saved,
    texts_of,
    token_prompts,
    tree_options,
)

from pagedtree.integrations.vllm.attention import PagedTreeBackend
from pagedtree.integrations.vllm.latent import PagedTreeLatentBackend

PROMPTS = token_prompts()
# Stock vLLM with its rotation in torch; see `limits.avoid_rotary_op`.
STOCK = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
CUSTOM = {"attention_backend": "CUSTOM"}
HEADS = {"env": {"VLLM_MLA_DISABLE": "1"}}  # expands latents to ordinary heads
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
YARN |= {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
SIZES = dict(vocab_size=2048, hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=4, kv_lora_rank=512, qk_rope_head_dim=64, max_position_embeddings=1024)
SIZES |= dict(initializer_range=0.1, bos_token_id=0, eos_token_id=1)
EXPERTS = dict(moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1)
EXPERTS |= dict(first_k_dense_replace=1)
GREEDY = dict(topk_method="greedy", n_group=1, topk_group=1)
NOAUX = dict(topk_method="noaux_tc", n_group=2, topk_group=1)
# Expanded heads have 192, 96 and 256 columns, with padded values.
MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV2": dict(q_lora_rank=None, qk_nope_head_dim=128, v_head_dim=128, rope_parameters=YARN, **GREEDY),
    "DeepseekV3": dict(q_lora_rank=64, qk_nope_head_dim=32, v_head_dim=32, num_nextn_predict_layers=0, **NOAUX),
    "Glm4MoeLite": dict(q_lora_rank=64, qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1),
}


def write_model(name: str, folder: Path) -> str:
    """A dense layer and two of experts."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES, **EXPERTS, **MODELS[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return saved(model, folder, 0.1)


@pytest.fixture(scope="module", params=of_runner(MODELS, ["DeepseekV3"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def stock(model) -> list[list[int]]:
    with engine(model=model, **STOCK) as llm:
        assert runner_of(llm).attn_groups[0][0].backend.get_name() == "CPU_MLA"
        output = generate(llm, PROMPTS)
    assert all(len(set(tokens)) > 2 for tokens in output)
    return output


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    path = write_model("DeepseekV3", tmp_path_factory.mktemp("deepseek"))
    with engine(model=path, **CUSTOM) as llm:
        return path, generate(llm, PROMPTS)


def oracle(outputs: list[list[int]]) -> dict[str, Any]:
    return oracle_options(PROMPTS, outputs)


@pytest.mark.parametrize("heads", [{}, HEADS], ids=["latent", "heads"])
def test_greedy_output_is_stock(model, stock, heads):
    with engine(model=model, **CUSTOM, **heads) as llm:
        assert runner_of(llm).attn_groups[0][0].backend is (PagedTreeBackend if heads else PagedTreeLatentBackend)
        assert generate(llm, PROMPTS) == stock
    with engine(model=model, **oracle(stock), **heads) as llm:
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) > 12 * len(PROMPTS)


CHAINS = {**CUSTOM, "speculative_config": NGRAM}  # vLLM's drafter


@pytest.mark.parametrize(
    "drafting", [tree_options("ngram"), tree_options("model"), pytest.param(CHAINS, marks=V1_ONLY, id="chains")]
)
def test_drafters(deepseek, drafting):
    path, expected = deepseek
    with engine(model=path, **drafting) as llm:
        assert generate(llm, PROMPTS) == expected
        assert metrics_of(llm)["vllm:spec_decode_num_draft_tokens"] > 0


@V1_ONLY
def test_half_precision_is_as_exact_as_stock(deepseek):
    path, _ = deepseek
    exact = prompt_logprobs(model=path, **STOCK)
    stock_error = (prompt_logprobs(model=path, dtype="bfloat16", **STOCK) - exact).square().mean().sqrt()
    error = (prompt_logprobs(model=path, dtype="bfloat16", **CUSTOM) - exact).square().mean().sqrt()
    assert 0 < error < 1.25 * stock_error


def test_two_tensor_parallel_ranks(deepseek):
    """Each rank has half of the heads and all latents."""
    path, expected = deepseek
    with engine(model=path, **oracle(expected), **RANKS) as llm:
        assert generate(llm, PROMPTS) == expected
        assert accepted(llm) > 12 * len(PROMPTS)


def test_chunked_prefill_prefix_cache_and_block_size(deepseek, monkeypatch):
    """vLLM allows these for latent models on CPUs with AMX alone."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    path, expected = deepseek
    options = {"max_num_batched_tokens": 40, "block_size": 8, "enable_prefix_caching": True}
    for drafting in (CUSTOM, oracle(expected)):
        with engine(model=path, **drafting, **options) as llm:
            assert generate(llm, PROMPTS) == expected
            assert generate(llm, PROMPTS) == expected  # reads blocks with compacted trees
            assert runner_of(llm).kv_caches[0].shape[2] == 8
            assert metrics_of(llm)["vllm:prefix_cache_hits"] > 0


@V1_ONLY
@pytest.mark.slow
def test_compiled_model(deepseek, tmp_path):
    path, expected = deepseek
    env = {"VLLM_CACHE_ROOT": str(tmp_path)}
    assert texts_of(PROMPTS, model=path, **oracle(expected), enforce_eager=False, env=env) == expected


@V1_ONLY
@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("head_size not supported", {"hf_overrides": {"kv_lora_rank": 256}}),
        ("kv_cache_dtype not supported", {"kv_cache_dtype": "fp8"}),
        ("custom_ops: expected none of \\+rotary", {"compilation_config": {"custom_ops": ["+rotary_embedding"]}}),
    ],
)
def test_unsupported_configurations_are_refused(deepseek, message, options):
    path, _ = deepseek
    with pytest.raises(Exception, match=message), engine(model=path, **CUSTOM, **options):
        pass


@V1_ONLY
def test_sparse_attention_is_refused():
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.float32, kv_cache_dtype=None, block_size=16, use_mla=True, use_sparse=True
    )
    with pytest.raises(ValueError, match=r"PagedTreeLatentBackend.*sparse not supported"):
        current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, config)
