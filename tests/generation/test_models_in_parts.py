"""Models of several parts, wrapped or offloaded layers, and dtypes or devices that differ within a model."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from generate_case import TINY, generated, greedy, prompts_of, tiny
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from pagedtree.integrations.transformers import CombinedDrafter, ModelDrafter, NgramDrafter

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def with_vision(text_type):
    vision = {"model_type": "clip_vision_model", **VISION, "image_size": 28, "patch_size": 14}
    config = LlavaConfig(text_config={"model_type": text_type, **TINY}, vision_config=vision)
    return LlavaForConditionalGeneration(config).eval()


def attention_of(model):
    return [part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)]


@pytest.mark.parametrize("text_type", ["llama", "gemma2"])  # Gemma 2 has no sdpa
def test_parts_keep_their_attention(text_type):
    model, prompts = with_vision(text_type), prompts_of((5, 17))
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    expected, before, inside = [greedy(model, prompt) for prompt in prompts], attention_of(model), []
    one, other = ModelDrafter(model, num_nodes=4), ModelDrafter(model, num_nodes=4)
    for drafter in (NgramDrafter(4), CombinedDrafter(one, other)):
        on_step = lambda _: inside.append(model.config.vision_config._attn_implementation)  # noqa: E731
        assert generated(model, drafter, prompts, on_step=on_step)[0] == expected
        assert attention_of(model) == before and set(inside) == {"sdpa"}
    with pytest.raises(ZeroDivisionError):
        generated(model, one, prompts, callback=lambda *_: 1 / 0)
    assert attention_of(model) == before
    generated(tiny(0), ModelDrafter(model, num_nodes=4), prompts)
    assert attention_of(model) == before
