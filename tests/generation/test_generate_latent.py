"""`generate` with latent attention (DeepSeek-V2, V3, GLM-4.7-Flash): the model's own text from cached latents."""

from __future__ import annotations

import pytest
import torch
from support.drafters import SUBJECTS, Oracle
from support.models import HYBRIDS, IS_5, LENGTHS, generated, greedy, prompts_of, tiny_hybrid, tiny_latent

from pagedtree.integrations.transformers import ModelDrafter, PagedCache, tensor_parallel
from pagedtree.integrations.transformers import latent as latent_module
from pagedtree.integrations.transformers.latent import latent_layers

pytestmark = pytest.mark.skipif(not IS_5, reason="transformers 4.57 caches the keys and values of all heads")
SUBJECT = "latent"


def test_latents_are_all_that_is_cached(model, texts, monkeypatch):
    """A layer has one cache of 576 columns, no keys or values of heads, and no read of a dead slot."""
    drafter = SUBJECTS["latent"].drafter("oracle")  # decodes by transformers, which expands keys
    expanded = []
    handles = [layer.kv_b_proj.register_forward_hook(lambda *_: expanded.append(1)) for layer in latent_layers(model)]
    layer, shapes = PagedCache.layer, set()

    def poisoned(cache, index, k, v):
        is_new = index not in cache._layers
        pair = layer(cache, index, k, v)
        shapes.add((tuple(pair[0].shape[2:]), pair[1] is not None))
        for tensor in pair if is_new else ():
            if tensor is not None:
                tensor.fill_(float("nan"))
        return pair

    monkeypatch.setattr(PagedCache, "layer", poisoned)
    found, _ = generated(model, drafter, n=2)
    for handle in handles:
        handle.remove()
    assert found[::2] == texts
    assert shapes == {((1, 576), False)} and not expanded


def test_heads_of_other_latents_are_cached():
    """Mistral 4's keys and values are equally wide: 128 columns."""
    other = tiny_latent("mistral4")
    assert not latent_layers(other)
    expected = [greedy(other, prompt) for prompt in prompts_of(LENGTHS)]
    assert generated(other, Oracle(expected, 0.8))[0] == expected


def on_a_rank(group, name, texts):
    """Attention is split over the ranks; each has all recurrent states."""
    model = tiny_hybrid(name) if name in HYBRIDS else tiny_latent(name)
    shards = tensor_parallel(model, group=group)
    rows = [latent_module._weight(layer).shape[0] for layer in latent_layers(model)]
    return generated(model, Oracle(texts, 0.8), shards=shards, n=2)[0][::2], rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "glm4_moe_lite", "qwen3_next", "nemotron_h"])
def test_two_ranks(name, ranks):
    """transformers' plans split the heads of latent attention, except DeepSeek-V3's."""
    target = tiny_hybrid(name) if name in HYBRIDS else tiny_latent(name)
    texts = [greedy(target, prompt) for prompt in prompts_of(LENGTHS)]
    parts = 1 if name == "deepseek_v3" else 2
    rows = [layer.kv_b_proj.weight.shape[0] // parts for layer in latent_layers(target)]
    assert ranks.run(on_a_rank, 2, name, texts) == [(texts, rows)] * 2


class Quantised(torch.nn.Linear):
    pass


def refused(change):
    model = tiny_latent("glm4_moe_lite", num_hidden_layers=1)
    change(model.model.layers[0].self_attn)
    return model


def projected_by(make):
    return lambda: refused(lambda layer: setattr(layer, "kv_b_proj", make(layer.kv_b_proj)))


REFUSED = [
    (lambda: tiny_latent(num_hidden_layers=1, kv_lora_rank=256), "got DeepseekV3Attention of kv_lora_rank 256 and"),
    (lambda: tiny_latent("deepseek_v2", num_hidden_layers=1, qk_rope_head_dim=32), "512 and qk_rope_head_dim 32"),
    (lambda: refused(lambda layer: setattr(layer, "indexer", torch.nn.Identity())), "chooses tokens by an indexer"),
    (projected_by(lambda own: Quantised(512, 896, bias=False)), "kv_b_proj .* got Quantised of torch.float32 on cpu"),
    (projected_by(lambda own: own.to(torch.float8_e4m3fn)), "got Linear of torch.float8_e4m3fn"),
    (projected_by(lambda own: own.to("meta")), "all layers on one device, got cpu, meta"),
    (projected_by(lambda own: torch.nn.Linear(512, 896)), "torch.nn.Linear without bias"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused_by_name(make, message, model):
    other = make()
    with pytest.raises(ValueError, match=f"model: expected .*{message}"):
        generated(other)
    with pytest.raises(ValueError, match=f"model: expected .*{message}"):
        generated(model, ModelDrafter(other))
