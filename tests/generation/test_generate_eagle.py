"""EAGLE-3 heads: arithmetic, checkpoints, and trees in `generate`."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from support.batches import paths_of
from support.heads import SIZES, causal_attention, eagle_head, features_of
from support.models import SAMPLING, VOCAB, prompts_of, room_of, tiny

from pagedtree.generation import drafters
from pagedtree.generation.drafters import EagleDrafter, EagleHead, waiting_features
from pagedtree.generation.drafters.checkpoint_config import ConfigEntries
from pagedtree.generation.drafters.eagle_config import EagleConfig
from pagedtree.generation.drafters.rotary_config import Rotary
from pagedtree.integrations.transformers import generate

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 21, 1, 34)
RUNS = [
    {},
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
def test_trees_are_those_of_a_head_without_a_cache(model, head, options, tree):
    """A wrong row or state in the head's cache would change a tree."""
    records = []

    def collect(result):
        bounds = list(pairwise(result.trees.cu_nodes.tolist()))
        tokens, parents, room = result.draft_tokens.tolist(), result.trees.parents.tolist(), room_of(result)
        for b in range(result.num_read, len(result.sequences)):
            text, rows = result.sequences[b].tokens[: int(result.start[b]) + 1], slice(*bounds[b])
            records.append((text, tokens[rows], parents[rows], room[b]))

    drafter, options = EagleDrafter(head, **tree), {**options, "params": SAMPLING, "on_step": collect}
    generate(model, prompts(), drafter=drafter, max_new_tokens=8, **options)
    trees = [record for record in records if len(record[1]) > 1]
    assert len(trees) > len(records) / 2
    compared = 0
    for text, draft_tokens, parents, room in trees[:: max(len(trees) // 24, 1)]:
        expected, gap = best_tree(head, features_of(model, text), text, **tree)
        if gap > 1e-3:  # smaller gaps are decided by rounding
            assert {*paths_of(draft_tokens, parents)[1:]} == {path for path in expected if len(path) <= room}
            compared += 1
    assert compared > 12


def test_features_that_wait_are_read_before_they_are_many(model, head, monkeypatch):
    """Steps without drafts read waiting features; the next tree is the same."""
    runs, row_bytes = [], 3 * model.config.hidden_size * 4
    for limit in (2048, 3):
        monkeypatch.setattr(waiting_features, "MAX_WAITING_BYTES", limit * row_bytes)
        drafter, run = EagleDrafter(head, num_nodes=10, depth=3, width=3), []
        propose, turn = drafter.propose, [0]

        def seldom(tokens, lengths, drafter=drafter, propose=propose, turn=turn, limit=limit):
            turn[0] += 1
            queues = drafter._waiting._queues.values()
            assert drafter._waiting._num_plain + sum(queue.count for queue in queues) <= limit + len(lengths)
            return propose(tokens, lengths) if turn[0] % 6 == 0 else drafters.NoDrafter().propose(tokens, lengths)

        drafter.propose = seldom
        note = lambda result, run=run: run.append((result.draft_tokens.tolist(), result.trees.parents.tolist()))  # noqa: E731
        generate(model, prompts(), drafter=drafter, max_new_tokens=20, on_step=note)
        runs.append(run)
    assert runs[0] == runs[1]


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
