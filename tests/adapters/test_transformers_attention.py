"""The attention implementation "pagedtree" in forward passes and `model.generate` of transformers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from support.models import IS_5, MODELS, tiny, tiny_of
from transformers import BertConfig, BertModel

from pagedtree.integrations.transformers import attention, register
from pagedtree.integrations.transformers.attention import attention_forward

pytestmark = pytest.mark.usefixtures("one_thread")


def pair(name="full"):
    ours = tiny_of(name, pad_token_id=0)
    ours.set_attn_implementation("pagedtree")
    return ours, tiny_of(name, pad_token_id=0)


def inputs(padded=True):
    torch.manual_seed(1)
    input_ids = torch.randint(1, 128, (3, 21))
    mask = torch.ones_like(input_ids)
    if padded:
        mask[0, :7] = mask[2, :2] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


def test_layers_share_the_words_of_a_mask(monkeypatch):
    """A write to the mask, or another length, packs it anew."""
    packs = []
    pack = attention._pack_mask
    monkeypatch.setattr(attention, "_pack_mask", lambda *args: packs.append(args) or pack(*args))
    ours, _ = pair()
    with torch.no_grad():
        ours(**inputs())
    assert ours.config.num_hidden_layers > 1 and len(packs) == 1
    mask = torch.ones(1, 1, 3, 40, dtype=torch.bool)
    first = attention._mask_words(mask, 1, 3, 40)
    assert attention._mask_words(mask, 1, 3, 40) is first
    mask[..., 5] = False
    assert torch.equal(attention._mask_words(mask, 1, 3, 40), pack(mask, 1, 3, 40))
    assert not torch.equal(attention._mask_words(mask, 1, 3, 40), first)
    assert attention._mask_words(mask, 1, 3, 20).shape[1] == 1
    with torch.inference_mode():  # tensors have no version there
        mask = mask.clone()
        attention._mask_words(mask, 1, 3, 40)
        mask[..., 6] = False
        assert torch.equal(attention._mask_words(mask, 1, 3, 40), pack(mask, 1, 3, 40))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_text_are_those_of_the_reference(name, padded):
    batch = inputs(padded)
    ours, reference = pair(name)
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits[mask], reference(**batch).logits[mask], rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours.generate(**batch, **options), reference.generate(**batch, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_error_is_below_twice_the_models(name, dtype):
    ours, reference = pair(name)
    batch = inputs()
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        exact = reference(**batch).logits[mask]
        errors = [(model.to(dtype)(**batch).logits[mask] - exact).square().mean().sqrt() for model in (ours, reference)]
    assert 0 < errors[0] < 2 * errors[1]


SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9}


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        SAMPLING,
        {**SAMPLING, "num_return_sequences": 3},
        {"num_beams": 3, "do_sample": False},
        {"cache_implementation": "static", "do_sample": False},
        {"cache_implementation": "static", **SAMPLING},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_other_ways_to_generate(options, padded):
    """Draws are torch's, so its seed reproduces the text, too."""
    texts = []
    for model in pair():
        torch.manual_seed(5)
        texts.append(model.generate(**inputs(padded), max_new_tokens=12, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assisted_generation(kind, do_sample):
    batch = {name: tensor[1:2] for name, tensor in inputs().items()}
    texts = []
    for model in pair():
        assistant = tiny(1, num_hidden_layers=1, pad_token_id=0)
        assistant.set_attn_implementation(model.config._attn_implementation)
        options = {"assistant_model": assistant} if kind == "assistant_model" else {kind: 4}
        torch.manual_seed(5)
        texts.append(model.generate(**batch, **options, max_new_tokens=12, do_sample=do_sample))
    assert torch.equal(*texts)


def test_every_layer_of_every_pass_is_ours(monkeypatch):
    calls, op = [], attention.tree_attention
    monkeypatch.setattr(attention, "tree_attention", lambda *args, **options: calls.append(1) or op(*args, **options))
    register()  # again
    ours, _ = pair()
    ours.generate(**inputs(), max_new_tokens=12, do_sample=False)
    assert len(calls) == ours.config.num_hidden_layers * 12


def test_explicit_masks():
    """Bool and additive masks of four dimensions, where some rows see only themselves."""
    ours, reference = pair()
    torch.manual_seed(2)
    input_ids = inputs()["input_ids"]
    mask = (torch.rand(3, 1, 21, 21) < 0.4) | torch.eye(21, dtype=torch.bool)
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = reference(input_ids, attention_mask=mask).logits
        for form in (mask, additive, torch.where(mask, 0.0, -torch.inf), torch.where(mask, 0.0, -10000.0)):
            torch.testing.assert_close(ours(input_ids, attention_mask=form).logits, expected, rtol=1e-4, atol=1e-4)
    with (
        pytest.raises(ValueError, match=r"attention_mask: expected bool, or 0 and at most -10000, got a bias"),
        torch.no_grad(),
    ):
        ours(input_ids, attention_mask=torch.rand(3, 1, 21, 21))


# In transformers 4.57 the experts of gpt-oss are a loop on a CPU.
@pytest.mark.parametrize("name", ["sinks" if IS_5 else "window"])
def test_compiled_models_have_one_graph(name):
    ours, _ = pair(name)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        for batch in (inputs(padded=True), inputs(padded=False)):
            assert torch.equal(compiled(**batch).logits, ours(**batch).logits)
    torch.compiler.reset()


def test_layers_that_are_not_causal():
    options = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    reference = BertModel(BertConfig(**options, intermediate_size=128)).eval()
    batch = inputs()
    with torch.no_grad():
        expected = [reference(**batch)[0], reference(batch["input_ids"])[0]]
        reference.set_attn_implementation("pagedtree")
        got = [reference(**batch)[0], reference(batch["input_ids"])[0]]
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(got[0][mask], expected[0][mask], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-4)


class Layer(torch.nn.Module):
    layer_idx, is_causal = 0, True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head_dim in 16, 32, 64, .*, or 192 for k and 128 for v, got 80 for k and 80"),
        ({"dropout": 0.1}, "expected no attention dropout, got 0.1"),
        ({"training": True}, "no backward pass"),
        ({"output_attentions": True}, "attention weights cannot be returned"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"cache": object()}, "continuous batching is not supported"),
        ({"mask": torch.ones(1, 4)}, r"attention_mask: expected \[B, 1, T, S\], got \[1, 4\]"),
    ],
)
def test_refuses_features_that_the_op_lacks(change, message):
    states = torch.zeros(1, 2, 4, change.pop("head_dim", 64))
    layer = Layer().train(change.pop("training", False))
    with pytest.raises(ValueError, match=message):
        attention_forward(layer, states, states, states, change.pop("mask", None), **change)
