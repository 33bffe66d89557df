"""`generate` with recurrent and attention layers (Qwen3-Next, Kimi Linear, Nemotron-H ...): the model's own text.

Each sequence has an index of states, and no tree node has states.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.drafters import Oracle
from support.models import IS_5, generated, greedy, prompts_of, tiny_hybrid

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.generation.recurrent_states import RecurrentStates
from pagedtree.integrations.transformers import ModelDrafter
from pagedtree.testing import backends, use_backend

if not IS_5:
    pytest.skip("transformers 4.57 writes these models otherwise", allow_module_level=True)
SUBJECT = "hybrid"


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_prompts_of_several_chunks(name):
    """Prompts exceed a chunk of the ops (64 tokens) and a pass; evicted texts are read again."""
    other, prompts = tiny_hybrid(name), prompts_of((64, 65, 200, 129))
    expected = [greedy(other, prompt, 20) for prompt in prompts]
    texts, stats = generated(other, Oracle(expected, 0.8), prompts, 20, num_pages=24, max_batch_tokens=70)
    assert texts == expected and stats.evictions > 0


def test_states_of_fixed_steps_keep_their_place():
    states = RecurrentStates(torch.device("cpu"))
    tensor = states.tensor((0, "state"), (2,), torch.float32)
    states.reserve(3)
    assert tensor.shape[0] == 0 and states[0, "state"].shape == (3, 2)
    assert sorted(states.state_index(sequence) for sequence in (7, 8, 9)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="expected at most 3 to be taken, got one more"):
        states.state_index(10)
    states.release(8)
    assert states.state_index(10) == 1


@pytest.mark.skipif(not {"simt", "cuda"} & set(backends()), reason="a build without simt")
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "lfm2"])
def test_the_cuda_kernels(monkeypatch, name):
    """simt or a GPU produces the CPU's text, also in fixed buffers."""
    monkeypatch.setattr(FixedStep, "captures", False)
    kinds = ["conv" if name == "lfm2" else "linear_attention", "full_attention"]
    options = {"num_hidden_layers": 2, "layers_block_type" if name == "nemotron_h" else "layer_types": kinds}
    half, prompts = tiny_hybrid(name, **options).to(torch.float16), [[3, 9, 4, 7, 3, 9, 4], [5, 3, 9, 4, 5, 3]]
    expected, _ = generated(half, None, prompts, 4)
    device, backend = ("cuda", nullcontext()) if "cuda" in backends() else ("cpu", use_backend("simt"))
    with backend:
        for keywords in ({"n": 2, "page_size": 4}, {"cuda_graph": True}):
            texts, _ = generated(half.to(device), NgramDrafter(6), prompts, 4, **keywords)
            assert texts == [text for text in expected for _ in range(keywords.get("n", 1))]


def test_larger_trees_are_refused(model):
    with pytest.raises(ValueError, match="at most 256 nodes for a model with recurrent layers, got max_nodes 300"):
        generated(model, NgramDrafter(300))


def test_draft_models_with_recurrent_layers_are_refused(model):
    with pytest.raises(ValueError, match="draft model without recurrent layers, got Qwen3NextForCausalLM"):
        ModelDrafter(model)


def changed(**attributes):
    model = tiny_hybrid(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    for name, value in attributes.items():
        setattr(model.model.layers[0].linear_attn, name, value)
    return model


class OtherDeltaNet(torch.nn.Module):
    layer_idx = 0

    def forward(self, hidden_states, cache_params=None):
        return hidden_states


def of_another_kind():
    model = changed()
    model.model.layers[0].linear_attn = OtherDeltaNet()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(forward=lambda x: x), "Qwen3NextGatedDeltaNet as it was made, got one whose forward was"),
        (lambda: changed(activation="gelu"), "convolutions with silu in Qwen3NextGatedDeltaNet, got gelu"),
        (lambda: changed(head_v_dim=20), "head_v_dim of Qwen3NextGatedDeltaNet to be a multiple of 8 .*, got 20"),
        (lambda: changed(head_k_dim=264), "head_k_dim of Qwen3NextGatedDeltaNet .* up to 256, got 264"),
        (of_another_kind, "recurrent layers among Qwen3NextGatedDeltaNet, .*, got OtherDeltaNet"),
    ],
)
def test_layers_that_are_refused(make, message):
    with pytest.raises(ValueError, match=f"model: expected {message}"):
        generated(make())
