"""Packed passes leave the rotation to the attention where that changes no bit of fp32; everywhere else they do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from architecture_case import NAMES, tiny_model
from generate_case import greedy, lists, prompts_of, tiny
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from pagedtree import rope_append
from pagedtree.generation import paged_step
from pagedtree.integrations.transformers import NgramDrafter, generate
from pagedtree.integrations.transformers import model as packed_models
from pagedtree.integrations.transformers.fused_rotary import RotaryLayer, rotary_layers

pytestmark = pytest.mark.usefixtures("one_thread")
NEW_TOKENS = 12
PROMPTS = (12, 17, 5)


@pytest.fixture(scope="module", autouse=True)
def layers_that_rotate() -> None:
    if not rotary_layers(tiny(0)):
        pytest.skip("this release of transformers wraps the layers")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RotaryLayer]]:
    """The layers that a call of `generate` has found."""
    layers: list[RotaryLayer] = []

    def recorded(model: Any) -> list[RotaryLayer]:
        layers[:] = rotary_layers(model)
        return layers

    monkeypatch.setattr(packed_models, "rotary_layers", recorded)
    yield layers


def results(model: Any, **options: Any) -> tuple[list[list[int]], Any]:
    """Texts, and the log-probabilities of their tokens."""
    texts, stats = generate(model, prompts_of(PROMPTS), max_new_tokens=NEW_TOKENS, logprobs=0, **options)
    return lists(texts), [sequence.logprobs for sequence in stats.sequences]


def of_type(name: str) -> Any:
    if name not in NAMES:
        pytest.skip("transformers has no such model")
    return tiny_model(name)


# Halves of all columns; of the first ones; beside other kinds of layers; with norms before; two tables of angles.
FUSED = ["llama", "qwen2", "qwen3", "gpt_neox", "glm4_moe", "phi3", "gemma3_text", "qwen3_next", "olmo2"]


@pytest.mark.parametrize("name", FUSED)
def test_bits_are_those_of_the_models_own_rotation(name: str, seen: list[RotaryLayer], monkeypatch) -> None:
    model = of_type(name)
    fused = results(model)
    assert seen and all(layer.is_fused for layer in seen)
    drafted = results(model, drafter=NgramDrafter(8))[0]
    monkeypatch.setattr(packed_models, "rotary_layers", lambda model: [])
    assert fused == results(model)
    assert drafted == fused[0]


# Neighbours are rotated; norms follow; parts of the heads come; half as many angles.
NOT_FUSED = ["cohere", "hunyuan_v1_dense", "stablelm", "gpt_oss"]


@pytest.mark.parametrize("name", NOT_FUSED)
def test_other_forms_go_on_as_before(name: str, seen: list[RotaryLayer]) -> None:
    model = of_type(name)
    texts = results(model)[0]
    assert seen and not any(layer.is_fused for layer in seen)
    assert texts == [greedy(model, prompt, NEW_TOKENS) for prompt in prompts_of(PROMPTS)]


def test_wrapped_layers_are_left_alone() -> None:
    model = tiny(0)
    first, second = (layer.self_attn for layer in model.model.layers)
    first.forward = first.forward  # as one that loads its weights before it runs
    assert [layer.module for layer in rotary_layers(model)] == [second]


def test_a_layer_that_changes_its_mind_is_refused(seen: list[RotaryLayer], monkeypatch) -> None:
    model = tiny(0)
    interface, passes = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface, []

    def doubles_later(name: str, default: Any) -> Any:
        attend = interface(name, default)
        passes.append(name)
        if len(passes) <= 2:  # both layers' first
            return attend
        return lambda module, query, *rest, **more: attend(module, query * 2, *rest, **more)

    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", doubles_later)
    with pytest.raises(ValueError, match="expected LlamaAttention to hand what it rotates to the attention, as in its"):
        generate(model, prompts_of(PROMPTS), max_new_tokens=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype, seen: list[RotaryLayer], monkeypatch) -> None:
    """Keys and queries are those of fp32 arithmetic on the model's own angles."""
    model: LlamaForCausalLM = tiny(0).to(dtype)
    calls = []

    def checked(q: Any, k: Any, v: Any, positions: Any, cos_sin: Any, k_cache: Any, v_cache: Any, slots: Any) -> Any:
        assert cos_sin.dtype == q.dtype == dtype
        cos, sin = (part.float()[:, None] for part in cos_sin[positions].chunk(2, dim=1))
        turned = []
        for x in (q, k):
            first, second = x.float().chunk(2, dim=2)
            turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2).to(dtype))
        out = rope_append(q, k, v, positions, cos_sin, k_cache, v_cache, slots)
        assert torch.equal(out, turned[0])
        assert torch.equal(k_cache.flatten(0, 1)[slots], turned[1])
        calls.append(q.shape[0])
        return out

    monkeypatch.setattr(paged_step, "rope_append", checked)
    generate(model, prompts_of((9,)), max_new_tokens=5)
    assert seen and calls == [1] * 4 * 2  # layers; the prompt's pass is each layer's first
