"""EAGLE-3 heads: arithmetic, checkpoints in published forms, and trees in `generate`."""

from __future__ import annotations

import json
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.batches import paths_of
from support.heads import LAYERS, SIZES, causal_attention, eagle_head, features_of
from support.models import SAMPLING, VOCAB, greedy, prompts_of, room_of, tiny

from pagedtree.generation import drafters
from pagedtree.generation.drafters import EagleDrafter, EagleHead, waiting_features
from pagedtree.generation.drafters.checkpoint_config import ConfigEntries
from pagedtree.generation.drafters.eagle_config import OF_MODELOPT, EagleConfig
from pagedtree.generation.drafters.rotary_config import Rotary
from pagedtree.integrations.transformers import generate

LENGTHS = (5, 21, 1, 34)
RUNS = [
    {"limit": 3},
    {"max_batch_tokens": 6, "page_size": 3},
    {"page_size": 7, "num_pages": 14},
    {"n": 3, "page_size": 4, "num_pages": 40},
]


@pytest.fixture(scope="module")
def model():
    return tiny(0, num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(model):
    return eagle_head(model)


def prompts():
    return prompts_of(LENGTHS, seed=3)


@torch.no_grad()
def guess(head, features, text, path):
    """Returns uncached log-probabilities [draft vocabulary] after the text and a drafted path."""
    states = head.fuse(features[: len(text) - 1])
    tokens = [*text[1:], *path]
    for end in range(len(text) - 1, len(tokens) + 1):
        out = head(torch.tensor(tokens[:end]), states, torch.arange(end), causal_attention)
        states = torch.cat([states, out[-1:]])
    return head.logits(out[-1]).log_softmax(-1)


def best_tree(head, features, text, num_nodes, depth, width):
    """Returns EAGLE-2's tree as paths with log-probabilities, and the gap to the best node outside."""
    found, frontier = {}, {(): 0.0}
    for _ in range(depth):
        new = {}
        for path, score in frontier.items():
            values, ids = guess(head, features, text, path).topk(width)
            for value, token in zip(values.tolist(), head.target_ids[ids].tolist(), strict=True):
                new[(*path, token)] = score + value
        found |= new
        frontier = dict(sorted(new.items(), key=lambda item: -item[1])[:width])
    ranked = sorted(found.items(), key=lambda item: -item[1])
    gap = ranked[num_nodes - 2][1] - ranked[num_nodes - 1][1] if len(ranked) >= num_nodes else 1.0
    return dict(ranked[: num_nodes - 1]), gap


@pytest.mark.each_value
@pytest.mark.parametrize("options", RUNS)
@pytest.mark.parametrize("tree", [{"num_nodes": 8, "depth": 3, "width": 2}, {"num_nodes": 4, "depth": 3, "width": 1}])
def test_trees_are_those_of_a_head_without_a_cache(model, head, monkeypatch, options, tree):
    """A wrong row or state in the head's cache would change a tree.

    limit: features may wait while five of six steps have no drafts, and are read before they are more.
    """
    records = []

    def collect(result):
        bounds = list(pairwise(result.trees.cu_nodes.tolist()))
        tokens, parents, room = result.draft_tokens.tolist(), result.trees.parents.tolist(), room_of(result)
        for b in range(result.num_read, len(result.sequences)):
            text, rows = result.sequences[b].tokens[: int(result.start[b]) + 1], slice(*bounds[b])
            records.append((text, tokens[rows], parents[rows], room[b]))

    drafter, options = EagleDrafter(head, **tree), {**options, "params": SAMPLING, "on_step": collect}
    limit, propose, turns = options.pop("limit", None), drafter.propose, count()

    def seldom(tokens, lengths):
        queues = drafter._waiting._queues.values()
        assert drafter._waiting._num_plain + sum(queue.count for queue in queues) <= limit + len(lengths)
        return propose(tokens, lengths) if next(turns) % 6 == 5 else drafters.NoDrafter().propose(tokens, lengths)

    if limit is not None:
        monkeypatch.setattr(waiting_features, "MAX_WAITING_BYTES", limit * 3 * model.config.hidden_size * 4)
        drafter.propose = seldom
    generate(model, prompts(), drafter=drafter, max_new_tokens=8 if limit is None else 32, **options)
    trees = [record for record in records if len(record[1]) > 1]
    assert len(trees) > len(records) / (2 if limit is None else 8)
    compared = 0
    for text, draft_tokens, parents, room in trees[:: max(len(trees) // 24, 1)]:
        expected, gap = best_tree(head, features_of(model, text), text, **tree)
        if gap > 1e-3:  # smaller gaps are decided by rounding
            assert {*paths_of(draft_tokens, parents)[1:]} == {path for path in expected if len(path) <= room}
            compared += 1
    assert compared > 12


def test_the_heads_cache_is_given_back(model, head):
    drafter = EagleDrafter(head, num_nodes=10, depth=3, width=3)
    counts = []

    def count(result):
        counts.append((drafter.cache.pages_in_use, sum(len(s.tokens) + 16 for s in result.sequences)))

    generate(model, prompts(), drafter=drafter, max_new_tokens=30, page_size=1, on_step=count)
    assert all(pages <= tokens for pages, tokens in counts) and not drafter._known
    assert drafter.cache.pages_in_use == 0


def test_a_head_is_saved_and_loaded(model, head, tmp_path):
    head.save_pretrained(tmp_path, dtype=torch.float32)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 64
    # SGLang counts outputs of layers, vLLM their inputs.
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 1]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 2]
    assert tensors["fc.weight"].shape == (128, 3 * 128) and tensors["lm_head.weight"].shape == (64, 128)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (256, 256)
    # Draft token i is the target's token i + d2t[i].
    assert tensors["d2t"].tolist() == [i + 1 for i in range(64)]
    assert tensors["t2d"].tolist() == [i % 2 == 1 for i in range(VOCAB)]
    loaded = EagleHead.from_pretrained(tmp_path, model)
    assert same_guesses(loaded, head) and not loaded.training and loaded.lm_head is not None
    # The forms of vLLM's training and of older scripts.
    names = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    torch.save({f"model.{name}" if "layers" in name else name: t for name, t in names.items()}, tmp_path / "weights")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "weights").rename(tmp_path / "pytorch_model.bin")
    assert same_guesses(EagleHead.from_pretrained(tmp_path, model), head)


def same_guesses(one, other):
    features, tokens, positions = torch.randn(7, 3 * 128), torch.arange(7), torch.arange(3, 10)
    if not torch.equal(one.target_ids, other.target_ids):
        return False
    with torch.no_grad():
        return torch.equal(*(h.logits(h(tokens, h.fuse(features), positions, causal_attention)) for h in (one, other)))


@pytest.mark.parametrize(
    ("entries", "layers"),
    [
        ({}, (1, 5, 8)),  # of 12 layers, the outputs below layers 2, 6 and 9
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}}, (1, 4, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, (0, 3, 6)),
        ({"eagle_config": {"use_aux_hidden_state": True}, "eagle_aux_hidden_state_layer_ids": None}, (1, 5, 8)),
    ],
)
def test_layers_that_a_config_names(entries, layers):
    assert EagleConfig.read(ConfigEntries({**SIZES, **entries})).feature_layers(12) == layers


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
@pytest.mark.parametrize("version", [4, 5])
def test_rotations_are_those_of_transformers(kind, version):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = {**factors, "original_max_position_embeddings": 8192}
    scaling = {"default": {}, "linear": {"factor": 4.0}, "llama3": llama3}[kind]
    rotary = {"rope_type": kind, **scaling}
    entries = {"rope_parameters": {"rope_theta": 5e5, **rotary}}
    expected = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, rope_theta=5e5, rope_scaling=rotary)).inv_freq
    if version == 4:
        entries = {"rope_theta": 5e5, "rope_scaling": rotary if kind != "default" else None}
    torch.testing.assert_close(Rotary.of(ConfigEntries(entries)).frequencies(64), expected)


# ---- published forms, by tensors and entries alone for one sequence

# The config.json of published folders, in small sizes. In speculators' form the verifier's embedding and output layer
# are tied, not the head's.
PUBLISHED = json.loads(Path(__file__).with_name("published_heads.json").read_text(encoding="utf-8"))
SHARED = PUBLISHED.pop("shared")
NORMS = [
    {"rope_theta": 5e5},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
]


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
    assert same_guesses(EagleHead.from_pretrained(tmp_path, model), head)
    path.write_text(json.dumps({**config, "eagle_config": {**inner, "norm_output": False}}))
    with pytest.raises(ValueError, match="eagle_config: norm_output: expected the value at the top, true, got False"):
        EagleHead.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "DFlash"])
def test_published_forms_are_read(model, tmp_path, name):
    config = PUBLISHED[name] if name == "speculators" else {**SHARED, **PUBLISHED[name]}
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
    assert same_guesses(loaded, head) and loaded.feature_layers == LAYERS
    # Saving keeps the head.
    loaded.save_pretrained(tmp_path / "again", dtype=torch.float32)
    again = EagleHead.from_pretrained(tmp_path / "again", model)
    assert same_guesses(again, head) and again.config.norm_output == head.config.norm_output


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
