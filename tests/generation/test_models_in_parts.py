"""Models of several parts, wrapped or offloaded layers, and dtypes or devices that differ within a model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

from generate_case import TINY, generated, gpt2, greedy, prompts_of, tiny, tiny_eagle, tiny_heads
from subject_case import Subject
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from pagedtree.integrations.transformers import CombinedDrafter, EagleHead, MedusaDrafter, ModelDrafter, NgramDrafter

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


class Wrapped(nn.Module):
    """As adapters wrap an embedding: its weight, and no more of it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.change = base_layer, nn.Parameter(torch.randn_like(base_layer.weight) / 4)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, ids):
        return self.base_layer(ids) + nn.functional.embedding(ids, self.change)


@pytest.mark.parametrize("name", ["ngram tree", "draft model", "EAGLE", "medusa", "block"])
def test_wrapped_embeddings(name):
    model, prompts = tiny(0), prompts_of((5, 17))
    model.set_input_embeddings(Wrapped(model.get_input_embeddings()))
    expected = [greedy(model, prompt) for prompt in prompts]
    assert generated(model, Subject(lambda: model).drafter(name), prompts)[0] == expected
    assert generated(model, ModelDrafter(model, num_nodes=4), prompts)[0] == expected


def test_a_wrapped_table_of_positions():
    model, (prompt,) = gpt2(12), prompts_of((5,))
    model.transformer.wpe = Wrapped(model.transformer.wpe)
    with pytest.warns(UserWarning, match="12 positions"):
        (text,), stats = generated(model, None, [prompt])
    assert len(text) == 13 and stats.sequences[0].finish_reason == "length"


@pytest.mark.parametrize("place", ["embed_tokens", "lm_head", ""])
def test_offloaded_layers(place):
    accelerate = pytest.importorskip("accelerate")
    plain, model, prompts = tiny(0), tiny(0), prompts_of((5, 17))
    part = {"embed_tokens": model.model.embed_tokens, "lm_head": model.lm_head, "": model}[place]
    accelerate.cpu_offload(part, execution_device=torch.device("cpu"))
    expected = [greedy(plain, prompt) for prompt in prompts]
    for target, drafter in ((model, NgramDrafter(4)), (plain, ModelDrafter(model, num_nodes=4))):
        assert generated(target, drafter, prompts)[0] == expected
    with pytest.raises(ValueError, match=r"an embedding and an output layer in memory, .* got offloaded"):
        EagleHead.from_pretrained("", model)


class ExactHead(nn.Linear):
    """An output layer that computes in fp32."""

    def forward(self, states):
        return nn.functional.linear(states.float(), self.weight.float())


@pytest.mark.parametrize("name", ["EAGLE", "medusa", "block", "MTP"])
@pytest.mark.parametrize("how", ["stored", "hook", "cast"])
def test_an_output_layer_in_fp32(name, how):
    model, prompts = tiny(0).half(), prompts_of((5, 17))
    weight = model.lm_head.weight
    model.lm_head = (nn.Linear if how == "hook" else ExactHead)(*weight.T.shape, bias=False)
    model.lm_head.weight = nn.Parameter(weight if how == "cast" else weight.float())
    if how == "hook":
        model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    drafter, expected = Subject(lambda: model).drafter(name), [greedy(model, prompt) for prompt in prompts]
    for network in drafter.networks:
        network.half()
    assert generated(model, drafter, prompts)[0] == expected
    if how == "hook" and name != "MTP":
        network.float()
        with pytest.raises(ValueError, match=r"weights in the target's torch.float16 .* see its .to\(\)"):
            generated(model, drafter, prompts)


def test_shards_are_refused():
    model, prompts = tiny(0), prompts_of((5,))
    heads = MedusaDrafter(tiny_heads(model), 4)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        with pytest.raises(ValueError, match=r"in one piece, .* got shards \(DTensor\)"):
            tiny_eagle(model)
        with pytest.raises(ValueError, match=r"in one piece, .* got shards \(DTensor\)"):
            generated(model, heads, prompts)
    finally:
        dist.destroy_process_group()


def test_layers_on_two_devices():
    model = tiny(0)
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="expected all layers on one device, got cpu, meta"):
        generated(model)
