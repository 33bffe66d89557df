"""The attention backend produces the output of vLLM's backend under its scheduling and speculation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm_case import (
    DRAFT,
    LAYOUTS,
    NGRAM,
    accepted,
    engine,
    generate,
    of_runner,
    prompt_logprobs,
    runner_of,
    token_prompts,
    tree_options,
)

from pagedtree.integrations.vllm.attention import PagedTreeImpl, PagedTreeMetadata, kv_views

PROMPTS = token_prompts()


@pytest.mark.parametrize("layout", of_runner(LAYOUTS, LAYOUTS[::5]))
def test_layouts_are_used_in_place(stock, layout):
    with engine(**tree_options("model"), block_size=16, env={"VLLM_KV_CACHE_LAYOUT": layout}) as llm:
        cache = runner_of(llm).kv_caches[0]
        k_cache, v_cache = kv_views(cache, "auto")
        assert k_cache.data_ptr() == cache.data_ptr()
        assert v_cache.data_ptr() == cache.data_ptr() + k_cache.shape[-1] * k_cache.element_size()
        assert generate(llm, PROMPTS) == stock


@pytest.mark.parametrize("chains", [NGRAM, {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}])
def test_chains_of_vllm(stock, chains):
    with engine(attention_backend="CUSTOM", speculative_config=chains) as llm:
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) > 0


def test_half_precision_is_as_exact_as_stock():
    """Every backend rounds in bf16 and may swap nearly tied tokens, so errors are compared."""
    exact = prompt_logprobs()
    stock_error = (prompt_logprobs(dtype="bfloat16") - exact).square().mean().sqrt()
    error = (prompt_logprobs(dtype="bfloat16", attention_backend="CUSTOM") - exact).square().mean().sqrt()
    assert 0 < error < 1.25 * stock_error
    assert stock_error < 0.1


def test_fp8_cache(stock):
    """The first tokens survive fp8 rounding of keys and values."""
    with engine(attention_backend="CUSTOM", kv_cache_dtype="fp8") as llm:
        cache = runner_of(llm).kv_caches[0]
        assert cache.element_size() == 1
        outputs = generate(llm, PROMPTS)
    pairs = [p for got, expected in zip(outputs, stock, strict=True) for p in zip(got[:4], expected[:4], strict=True)]
    assert sum(a == b for a, b in pairs) >= 0.7 * len(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_new_weights_reach_the_sinks(dtype):
    """Sinks change in place, as after an update of weights."""
    torch.manual_seed(0)
    starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    step = PagedTreeMetadata(3, starts, lens, torch.zeros(1, 1, dtype=torch.int32), 3)
    query, cache, outputs = torch.randn(3, 4, 64, dtype=dtype), torch.randn(1, 2, 16, 128, dtype=dtype), []
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    kept = PagedTreeImpl(4, 64, 0.125, 2, sinks=sinks)
    for value in (0.0, 6.0):
        sinks.data.fill_(value)
        for impl in (kept, PagedTreeImpl(4, 64, 0.125, 2, sinks=sinks)):
            outputs.append(impl.forward(None, query, query, query, cache, step, torch.empty_like(query)))
    assert torch.equal(outputs[2], outputs[3]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_rotation_with_the_update_of_the_cache(is_neox, cache_dtype):
    """The fused call equals vLLM's rotation and our update; the last two rows are padding."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    torch.manual_seed(0)
    impl = PagedTreeImpl(4, 64, 0.125, 2, kv_cache_dtype=cache_dtype)
    assert impl.fused_rope_kvcache_supported()
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    query, key, value = torch.randn(7, 8, 64).split([4, 2, 2], dim=1)
    positions, table = torch.randint(90, (7,)), torch.randn(90, 32)
    slots = torch.tensor([3, 17, -1, 40, 4])
    caches = torch.zeros(2, 5, 2, 16, 128)
    if cache_dtype == "fp8":
        caches = caches.to(torch.uint8)
    rotated_q, rotated_k = RotaryEmbedding.forward_static(
        positions, query.flatten(1), key.flatten(1), 64, 32, table, is_neox
    )
    impl.do_kv_cache_update(layer, rotated_k.unflatten(1, (2, 64)), value, caches[0], slots)
    rows = query[5:].clone()
    impl.do_rope_and_kv_cache_update(layer, query, key, value, positions, table, is_neox, caches[1], slots)
    assert torch.equal(query[:5].flatten(1), rotated_q[:5]) and torch.equal(query[5:], rows)
    assert caches[0].any() and torch.equal(caches[1], caches[0])
