"""Models of several parts, wrapped or offloaded layers, mixed dtypes and devices; drafters of another target."""

from __future__ import annotations

import pytest
import torch
from support.drafters import Subject
from support.heads import DFLASH
from support.models import TINY, VOCAB, generated, gpt2, greedy, prompts_of, tiny, tiny_eagle, tiny_heads
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from pagedtree import DraftTree
from pagedtree.generation.drafters import (
    BlockDraftConfig,
    BlockDrafter,
    BlockDraftModel,
    CombinedDrafter,
    EagleDrafter,
    EagleHead,
    MedusaDrafter,
    MedusaHeads,
    NgramDrafter,
)
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


@pytest.mark.parametrize("name", ["itself", "EAGLE", "medusa", "block"])
def test_wrapped_embeddings(name):
    model = tiny(0)
    model.set_input_embeddings(wrapped(model.get_input_embeddings()))
    assert generated(model, Subject(lambda: model).drafter(name), PROMPTS)[0] == texts_of(model)


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


def test_shards_are_refused():
    """The target's pass alone has the whole weight, as under FSDP2."""
    model = tiny(0)
    heads, mesh = MedusaDrafter(tiny_heads(model), 4), DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    whole = model.lm_head.weight
    shards = nn.Parameter(DTensor.from_local(whole.data, mesh, [Replicate()], run_check=False))
    model.register_forward_pre_hook(lambda *_: setattr(model.lm_head, "weight", whole))
    model.register_forward_hook(lambda *_: setattr(model.lm_head, "weight", shards))
    model.lm_head.weight = shards
    for use in (tiny_eagle, lambda model: generated(model, heads, PROMPTS)):
        with pytest.raises(ValueError, match=r"in one piece for a draft head, got shards \(DTensor"):
            use(model)


# ---- drafters of another target are refused before it runs

EAGLE = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": VOCAB}


@pytest.fixture
def model():
    return tiny(0)


def narrow():
    return tiny(1, hidden_size=64, num_attention_heads=1, num_key_value_heads=1)


# A drafter's module.
PARTS = {"medusa": "heads", "EAGLE": "head", "block": "model"}


def drafter_of(name, model):
    return Subject(lambda: model).drafter(name)


def narrow_heads(name):
    """Makes a drafter for hidden size 64."""
    other, sizes = narrow(), {"hidden_size": 64, "intermediate_size": 32}
    if name == "medusa":
        return drafter_of(name, other)
    if name == "EAGLE":
        entries = {**sizes, "num_attention_heads": 1, "vocab_size": VOCAB}
        return EagleDrafter(EagleHead(entries, other.model.embed_tokens, other.lm_head, (0, 1)))
    config = BlockDraftConfig(**{**vars(DFLASH), **sizes})
    return BlockDrafter(BlockDraftModel(config, other.model.embed_tokens, other.lm_head))


def refused(model, drafter, message):
    """Checks that the target does not run."""

    def read(*args):
        raise AssertionError("the target reads a text")

    handle = model.register_forward_pre_hook(read)
    for candidate in (drafter, CombinedDrafter(drafter)):
        with pytest.raises(ValueError, match=message):
            generated(model, candidate)
    handle.remove()


@pytest.mark.parametrize("name", PARTS)
def test_another_hidden_size(model, name):
    message = {
        "medusa": r"hidden size 128, weight \[3, 128, 128\] and bias \[3, 128\], got \[3, 64, 64\] and \[3, 64\]",
        "EAGLE": "a head of the target's hidden size 128, got one that reads 128 features of 2 layers",
        "block": "a target with 128 features of a token, got 256",
    }[name]
    refused(model, narrow_heads(name), message)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("size", [100, 200])
def test_another_vocabulary(model, name, size):
    drafter, target = drafter_of(name, model), tiny(1, vocab_size=size)
    if name == "block" and size < VOCAB:  # tokens that the target lacks are cut off
        generated(target, drafter, [torch.arange(5)])
        return
    message = {
        "medusa": f"expected heads of the target's {size} tokens, got 128",
        "EAGLE": "a head of the target's 100 tokens, got 126" if size < VOCAB else r"\[at least 200, 128\]",
        "block": r"embeddings of the target's 200 tokens and of hidden_size 128, got \[128, 128\]",
    }[name]
    with pytest.raises(ValueError, match=message):
        generated(target, drafter, [torch.arange(5)])


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("place", [torch.bfloat16, torch.device("meta")])
def test_another_dtype_or_device(model, name, place):
    drafter = drafter_of(name, model)
    getattr(drafter, PARTS[name]).to(place)
    refused(model, drafter, "drafter: expected .* target's .*(float32 on cpu|device cpu), got")


def test_a_draft_model_on_another_device(model):
    refused(model, ModelDrafter(tiny(1).to("meta"), num_nodes=4), "its model on the target's device cpu, got meta")


def test_layers_that_the_target_lacks(model):
    drafter = drafter_of("EAGLE", model)
    for drafter.feature_layers in ((2,), (-1, 0)):
        with pytest.raises(ValueError, match=r"feature_layers: expected layers of 0\.\.1"):
            generated(model, drafter)


def test_weights_that_were_given_directly(model):
    drafter = drafter_of("medusa", model)
    for weight, bias in (((3, 64, 64), (3, 64)), ((3, 128, 64), (3, 128)), ((2, 128, 128), (3, 128))):
        drafter.heads.weight, drafter.heads.bias = (nn.Parameter(torch.zeros(shape)) for shape in (weight, bias))
        refused(model, drafter, "drafter: expected heads of the target's hidden size 128")
    for name, layer in {
        "lm_head": nn.Linear(128, 65, bias=False),
        "embed_tokens": nn.Embedding(100, 128),
        "fc": nn.Linear(3 * 128, 128, bias=False),
    }.items():
        drafter = drafter_of("EAGLE", model)
        setattr(drafter.head, name, layer)
        refused(model, drafter, "features of 2 layers" if name == "fc" else rf"{name}\.weight: expected")


def test_modules_that_do_not_fit_are_refused_when_made(model):
    with pytest.raises(ValueError, match="hidden_size: expected 128, what lm_head reads, got 64"):
        MedusaHeads(64, 3, model.lm_head)
    for sizes in ((0, 3), (128, 0)):
        with pytest.raises(ValueError, match="expected at least 1, got 0"):
            MedusaHeads(*sizes, model.lm_head)
    with pytest.raises(ValueError, match="tree: expected at most 3 levels, one for each head, got 4"):
        MedusaDrafter(MedusaHeads(128, 3, model.lm_head), DraftTree.chain(4))
    with pytest.raises(ValueError, match=r"embed: expected a weight of \[.*hidden_size 128\], got \[128, 64\]"):
        BlockDraftModel(DFLASH, narrow().model.embed_tokens, model.lm_head)
    for ids in (torch.tensor([128]), torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([[1]])):
        with pytest.raises(ValueError, match="target_ids: expected"):
            EagleHead(EAGLE, model.model.embed_tokens, model.lm_head, (0, 1), ids)
    with pytest.raises(ValueError, match="intermediate_size: expected an integer from 1 to 16777216, got 10000000000"):
        EagleHead({**EAGLE, "intermediate_size": 10**12}, model.model.embed_tokens, model.lm_head, (0, 1))


def test_heads_of_any_kind_that_name_tokens_the_target_lacks(model):
    """Only their logits show the width of foreign heads."""
    weight = torch.randn(3, 2 * VOCAB, 128)
    drafter = MedusaDrafter(lambda hidden: torch.einsum("bd,hvd->bhv", hidden, weight), 9)
    with pytest.raises(ValueError, match="expected heads of the target's 128 tokens, got logits of 256"):
        generated(model, drafter)
