"""`generate` on compiled models, within `torch.autocast`, and below autograd."""

from __future__ import annotations

import pytest
import torch
from support.drafters import Subject
from support.models import generated, greedy, prompts_of, tiny, tiny_hybrid, tiny_latent, tiny_of
from torch import nn

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.integrations.transformers import ModelDrafter, packed_weights
from pagedtree.integrations.transformers.model import use_attention
from pagedtree.integrations.transformers.packed_weights import MIN_ELEMENTS

PROMPTS = (5, 17)


class Backend:
    def __init__(self):
        self.num_runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.num_runs += 1
            return graph.forward(*args)

        return run


def compiled_model(how, backend):
    torch._dynamo.reset()
    model = tiny(0, num_hidden_layers=1)
    if how == "model":
        return torch.compile(model, backend=backend)
    if how == "in place":
        model.compile(backend=backend)
    elif how == "forward":
        model.forward = torch.compile(model.forward, backend=backend)
    elif how == "layers":
        for layer in model.model.layers:
            layer.self_attn.forward = torch.compile(layer.self_attn.forward, backend=backend)
    else:
        model.model.layers[0] = torch.compile(model.model.layers[0], backend=backend)
    return model


WAYS = [("model", False), ("in place", True), ("forward", False), ("layers", False), ("replaced layer", True)]


@pytest.mark.parametrize(("how", "is_warm"), WAYS)
def test_compiled_models(how, is_warm, monkeypatch):
    monkeypatch.setitem(MIN_ELEMENTS, torch.float32, 1)
    backend, prompts = Backend(), prompts_of(PROMPTS)
    expected = [greedy(tiny(0, num_hidden_layers=1), prompt) for prompt in prompts]
    model = compiled_model(how, backend)
    if is_warm:
        assert greedy(model, prompts[0], 2) == expected[0][: PROMPTS[0] + 2]
    before = backend.num_runs
    drafter = ModelDrafter(compiled_model(how, backend), num_nodes=4) if how == "model" else NgramDrafter(4)
    assert generated(model, drafter, prompts)[0] == expected
    with packed_weights(model) as count:
        assert count == 8 and greedy(model, prompts[0]) == expected[0]
        assert generated(model, drafter, prompts)[0] == expected
    assert backend.num_runs == before
    model(prompts[0][None])
    assert backend.num_runs > before and greedy(model, prompts[0], 2) == expected[0][: PROMPTS[0] + 2]


AUTOCAST = {
    "full": tiny_of,
    "window": tiny_of,
    "deepseek_v3": tiny_latent,
    "qwen3_next": tiny_hybrid,
    "falcon_h1": tiny_hybrid,
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own, of norms in autocast
@pytest.mark.parametrize(
    ("name", "drafter"),
    [*((name, "ngram tree") for name in AUTOCAST), ("full", "draft model"), ("full", "EAGLE"), ("full", "block")],
)
def test_autocast(name, drafter):
    model, prompts = AUTOCAST[name](name), prompts_of(PROMPTS)
    with torch.autocast("cpu", torch.float16):  # in bfloat16 tokens are nearly tied
        expected = [greedy(model, prompt, 10) for prompt in prompts]
        assert generated(model, Subject(lambda: model).drafter(drafter), prompts, 10)[0] == expected
        with use_attention(model):
            assert [greedy(model, prompt, 10) for prompt in prompts] == expected


def test_refusals_within_autocast(monkeypatch):
    monkeypatch.setitem(MIN_ELEMENTS, torch.float32, 1)
    model, drafter = tiny(0), NgramDrafter(4)
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(ValueError, match=r"cuda_graph: expected False within torch\.autocast"):
            generated(model, drafter, cuda_graph=True)
        with packed_weights(model), pytest.raises(RuntimeError, match=r"packed_weights: .* within torch\.autocast"):
            generated(model, drafter)


# Passes run below autograd and leave its state unchanged --------------------------------------------------------------

AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def is_below_autograd():
    return torch._C._dispatch_tls_is_dispatch_key_excluded(AUTOGRAD)


class OwnTensor(torch.Tensor):
    """May depend on autograd's dispatch."""


@pytest.mark.parametrize("is_plain", [True, False])
def test_only_passes_of_plain_weights_are_below_autograd(is_plain):
    model, prompts, inside, outside = tiny(0), prompts_of((5, 17)), set(), set()
    expected = [greedy(model, prompt) for prompt in prompts]
    if not is_plain:
        norm = model.model.norm
        norm.weight = nn.Parameter(norm.weight.detach().as_subclass(OwnTensor))
    model.model.layers[0].register_forward_pre_hook(lambda *_: inside.add(is_below_autograd()))
    texts, _ = generated(model, NgramDrafter(), prompts, on_step=lambda _: outside.add(is_below_autograd()))
    assert texts == expected
    assert inside == {is_plain} and outside == {False} and not is_below_autograd()
