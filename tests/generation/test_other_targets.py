"""Heads and draft models of another target are refused before the target runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from support.drafters import Subject
from support.heads import DFLASH
from support.models import VOCAB, generated, tiny

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
)
from pagedtree.integrations.transformers import ModelDrafter

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
