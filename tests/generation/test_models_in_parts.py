"""Models of several parts, wrapped or offloaded layers, mixed dtypes and devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

from support.drafters import Subject
from support.models import TINY, generated, gpt2, greedy, prompts_of, tiny, tiny_eagle, tiny_heads
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from pagedtree.generation.drafters import CombinedDrafter, EagleHead, MedusaDrafter, NgramDrafter
from pagedtree.integrations.transformers import ModelDrafter

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
PROMPTS = prompts_of((5, 17))


def texts_of(model):
    return [greedy(model, prompt) for prompt in PROMPTS]


def attention_of(model):
    return [part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)]


@pytest.mark.parametrize("text_type", ["llama", "gemma2"])  # Gemma 2 has no sdpa
def test_parts_keep_their_attention(text_type):
    config = LlavaConfig(text_config={"model_type": text_type, **TINY}, vision_config=VISION)
    model, inside = LlavaForConditionalGeneration(config).eval(), set()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    expected, before = texts_of(model), attention_of(model)
    one, other = ModelDrafter(model, num_nodes=4), ModelDrafter(model, num_nodes=4)
    vision = model.config.vision_config
    for drafter in (NgramDrafter(4), CombinedDrafter(one, other)):
        run = generated(model, drafter, PROMPTS, on_step=lambda _: inside.add(vision._attn_implementation))
        assert run[0] == expected and attention_of(model) == before and inside == {"sdpa"}
    with pytest.raises(ZeroDivisionError):
        generated(model, one, PROMPTS, callback=lambda *_: 1 / 0)
    generated(tiny(0), one, PROMPTS)
    assert attention_of(model) == before


def wrapped(layer):
    """Wraps an embedding as adapters do, which expose only its weight."""
    around = nn.Sequential(layer, nn.Hardshrink(0.1))
    around.weight = layer.weight
    return around


@pytest.mark.parametrize("name", ["ngram tree", "draft model", "EAGLE", "medusa", "block"])
def test_wrapped_embeddings(name):
    model = tiny(0)
    model.set_input_embeddings(wrapped(model.get_input_embeddings()))
    for drafter in (Subject(lambda: model).drafter(name), ModelDrafter(model, num_nodes=4)):
        assert generated(model, drafter, PROMPTS)[0] == texts_of(model)


def test_a_wrapped_table_of_positions():
    model = gpt2(12)
    model.transformer.wpe = wrapped(model.transformer.wpe)
    with pytest.warns(UserWarning, match="12 positions"):
        assert len(generated(model, None, PROMPTS[:1])[0][0]) == 13


@pytest.mark.parametrize("place", ["model.embed_tokens", "lm_head", ""])
def test_offloaded_layers(place):
    plain, model = tiny(0), tiny(0)
    pytest.importorskip("accelerate").cpu_offload(model.get_submodule(place), execution_device=torch.device("cpu"))
    for target, drafter in ((model, NgramDrafter(4)), (plain, ModelDrafter(model, num_nodes=4))):
        assert generated(target, drafter, PROMPTS)[0] == texts_of(plain)
    with pytest.raises(ValueError, match=r"an embedding and an output layer in memory for a draft head, got offloaded"):
        EagleHead.from_pretrained("", model)


class ExactHead(nn.Linear):
    """Computes in fp32."""

    def forward(self, states):
        return nn.functional.linear(states.float(), self.weight.float())


@pytest.mark.parametrize("name", ["EAGLE", "medusa", "block", "MTP"])
@pytest.mark.parametrize("how", ["forward", "hooks of tied weights"])
def test_an_output_layer_in_fp32(name, how):
    model = tiny(0).half()
    weight = model.lm_head.weight
    model.lm_head = (ExactHead if how == "forward" else nn.Linear)(*weight.T.shape, bias=False)
    model.lm_head.weight = nn.Parameter(weight.float())
    if how != "forward":
        model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        model.model.embed_tokens.weight = model.lm_head.weight
        model.model.embed_tokens.register_forward_hook(lambda *args: args[2].half())
    drafter = Subject(lambda: model).drafter(name)
    drafter.networks[0].half()
    assert generated(model, drafter, PROMPTS)[0] == texts_of(model)


def shard_and_draft(group):
    model = tiny(0)
    heads = MedusaDrafter(tiny_heads(model), 4)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), reshard_after_forward=True)
    for use in (tiny_eagle, lambda model: generated(model, heads, PROMPTS)):
        with pytest.raises(ValueError, match=r"in one piece for a draft head, got shards \(DTensor"):
            use(model)


def test_shards_are_refused(ranks):
    """Another process: torch keeps a DTensor's group to the end of a thread, where a fork waits for it."""
    ranks.run(shard_and_draft, 1)


def test_layers_on_two_devices():
    model = tiny(0)
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="expected all layers on one device, got cpu, meta"):
        generated(model)
