"""Published forms of heads load, and compute as plain PyTorch does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from support.heads import LAYERS, eagle_head, features_of
from support.models import VOCAB, greedy, lists, prompts_of, tiny

from pagedtree.generation.drafters import EagleDrafter, EagleHead
from pagedtree.generation.drafters.eagle_config import OF_MODELOPT
from pagedtree.integrations.transformers import generate

pytestmark = pytest.mark.usefixtures("one_thread")

# The config.json of published folders, in small sizes. In speculators' form the verifier's embedding and output layer
# are tied, not the head's.
PUBLISHED = json.loads(Path(__file__).with_name("published_heads.json").read_text(encoding="utf-8"))
NORMS = [
    {"rope_theta": 5e5},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
]


@pytest.fixture(scope="module")
def model():
    return tiny(0, num_hidden_layers=4)


# ---- a head by its tensors and entries alone, for one sequence


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x, positions, theta):
    """Rotates [T, heads, 64]; channels i and i + 32 are the parts of a complex number."""
    angles = positions[:, None, None] * theta ** (-torch.arange(32) / 32)
    turned = torch.complex(x[..., :32], x[..., 32:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def plain_layer(w, entries, embeds, states):
    """Returns outputs [T, 128] for embeddings and states."""
    count = len(states)
    normed = rms(states, w["midlayer.hidden_norm.weight"])
    inputs = torch.cat([rms(embeds, w["midlayer.input_layernorm.weight"]), normed], dim=1)
    q, k, v = (inputs @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = q.view(count, 4, 64), k.view(count, 2, 64), v.view(count, 2, 64)
    q, k = (rotated(x, torch.arange(count), entries.get("rope_theta", 10000.0)) for x in (q, k))
    heads = []
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].T / 8
        scores += torch.full((count, count), -torch.inf).triu(1)
        heads.append(scores.softmax(-1) @ v[:, head // 2])
    residual = normed if entries.get("norm_before_residual") else states
    residual = residual + torch.cat(heads, dim=1) @ w["midlayer.self_attn.o_proj.weight"].T
    inputs = rms(residual, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (inputs @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return residual + (gate * torch.sigmoid(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T


@torch.no_grad()
def plain_logits(model, w, entries, features, text, path):
    """Returns logits [1 + len(path), draft vocabulary] after the text and each token of a path."""
    if entries.get("norm_before_fc"):
        features = rms(features, w["input_norm.weight"])
    if entries.get("fc_norm"):
        parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(features.split(128, dim=1))]
        features = torch.cat(parts, dim=1)
    states, tokens, found = features @ w["fc.weight"].T, [*text[1:], *path], []
    for end in range(len(text) - 1, len(tokens) + 1):
        embeds = model.model.embed_tokens.weight[tokens[:end]]
        out = plain_layer(w, entries, embeds, states)[-1]
        normed = rms(out, w["norm.weight"])
        found.append(normed @ w["lm_head.weight"].T)
        states = torch.cat([states, (normed if entries.get("norm_output") else out)[None]])
    return torch.stack(found)


class Recorder(EagleDrafter):
    def __init__(self, head):
        super().__init__(head, num_nodes=4, depth=3, width=1)
        self.seen, logits = [], head.logits
        self.logits = []
        head.logits = lambda states: (self.logits.append(logits(states)), self.logits[-1])[1]

    def propose(self, tokens, lengths):
        self.logits.clear()
        draft = super().propose(tokens, lengths)
        if self.logits:
            self.seen.append((self._selected[0].tokens[:], draft.draft_tokens.tolist(), torch.cat(self.logits)))
        return draft


@pytest.mark.parametrize("entries", NORMS, ids=lambda entries: ", ".join(entries) or "plain")
def test_head_matches_plain_pytorch(model, tmp_path, entries):
    """A loaded head has plain PyTorch's logits."""
    eagle_head(model, **entries).save_pretrained(tmp_path, dtype=torch.float32)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert {name: config[name] for name in flags} == {name: entries.get(name, False) for name in flags}
    drafter, prompt = Recorder(EagleHead.from_pretrained(tmp_path, model)), prompts_of([9])[0]
    (text,), _ = generate(model, [prompt], drafter=drafter, max_new_tokens=16)
    assert text.tolist() == greedy(model, prompt, 16) and len(drafter.seen) > 3
    features = features_of(model, text.tolist())
    for prefix, chain, logits in drafter.seen:
        path = chain[1 : len(logits)]
        expected = plain_logits(model, tensors, entries, features[: len(prefix) - 1], prefix, path)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_flags_in_eagle_config(model, tmp_path):
    """NVIDIA's heads have flags there; ModelOpt adds entries of other heads."""
    head = eagle_head(model, norm_before_fc=True, norm_output=True)
    head.save_pretrained(tmp_path, dtype=torch.float32)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    inner = {**config["eagle_config"], **OF_MODELOPT, "norm_before_fc": config.pop("norm_before_fc")}
    inner["norm_output"] = True
    path.write_text(json.dumps({**config, "eagle_config": inner}))
    assert same(EagleHead.from_pretrained(tmp_path, model), head)
    path.write_text(json.dumps({**config, "eagle_config": {**inner, "norm_output": False}}))
    with pytest.raises(ValueError, match="eagle_config: norm_output: expected the value at the top, true, got False"):
        EagleHead.from_pretrained(tmp_path, model)


def same(one, other):
    features = torch.randn(7, 3 * 128)
    state = {name: tensor for name, tensor in other.state_dict().items() if "lm_head" not in name}
    assert all(torch.equal(one.state_dict()[name], tensor) for name, tensor in state.items())
    return torch.equal(one.fuse(features), other.fuse(features)) and torch.equal(one.target_ids, other.target_ids)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "DFlash"])
def test_published_forms_are_read(model, tmp_path, name):
    config = PUBLISHED[name]
    computed = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "rope_scaling", "rope_theta")
    layer = config.get("transformer_layer_config", {})
    entries = {key: value for key, value in {**config, **layer}.items() if key in (*computed, "rope_parameters")}
    head = eagle_head(model, **entries)
    head.save_pretrained(tmp_path, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    if name in ("vLLM", "speculators"):
        tensors = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
        tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    if name == "speculators":
        tensors["verifier_norm.weight"] = torch.ones(128)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = EagleHead.from_pretrained(tmp_path, model)
    assert same(loaded, head) and loaded.feature_layers == LAYERS
    assert torch.equal(loaded._angles._frequencies, head._angles._frequencies)
    texts = [greedy(model, prompt) for prompt in prompts_of((5, 12))]
    sequences, _ = generate(model, prompts_of((5, 12)), drafter=EagleDrafter(loaded), max_new_tokens=20)
    assert lists(sequences) == texts
    # Saving keeps the head.
    loaded.save_pretrained(tmp_path / "again", dtype=torch.float32)
    again = EagleHead.from_pretrained(tmp_path / "again", model)
    assert same(again, head) and again.config.norm_output == head.config.norm_output


@pytest.mark.parametrize(
    ("entries", "key"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"attention_multiplier": 0.5}, "attention_multiplier"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rot"),
    ],
)
def test_layers_of_speculators_that_are_not_computed(model, tmp_path, entries, key):
    eagle_head(model).save_pretrained(tmp_path)
    layer = {**PUBLISHED["speculators"]["transformer_layer_config"], **entries}
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["speculators"], "transformer_layer_config": layer}))
    with pytest.raises(ValueError, match=f"transformer_layer_config: .*{key}"):
        EagleHead.from_pretrained(tmp_path, model)


def test_a_tied_head_reads_its_embedding(model, tmp_path):
    head = eagle_head(model, None)
    head.save_pretrained(tmp_path, dtype=torch.float32)
    tensors, path = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    config = {**json.loads(path.read_text()), "tie_word_embeddings": True}
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    path.write_text(json.dumps(config))
    loaded = EagleHead.from_pretrained(tmp_path, model)
    assert torch.equal(loaded.output_rows, tensors["embed_tokens.weight"])
    save_file({**tensors, "d2t": torch.arange(64)}, tmp_path / "model.safetensors")
    path.write_text(json.dumps({**config, "draft_vocab_size": 64}))
    with pytest.raises(ValueError, match="tie_word_embeddings: expected false with 64 of 128 tokens"):
        EagleHead.from_pretrained(tmp_path, model)
