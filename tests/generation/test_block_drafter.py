"""Block drafters: paged passes equal dense ones under chunks, evictions and shared prompts; checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.drafters import Oracle
from support.heads import DFLASH, block_model, dense_block_logits
from support.models import LENGTHS, NEW_TOKENS, generated

from pagedtree.generation.drafters import BlockDraftConfig, BlockDrafter, BlockDraftModel, NoDrafter, waiting_features
from pagedtree.generation.drafters.checkpoint_config import CAUSAL

SUBJECT = "full"


class Recorder(BlockDrafter):
    """Records logits, and proposes an oracle's drafts, so that many are accepted."""

    def __init__(self, model, oracle):
        super().__init__(model, num_nodes=oracle.tree.num_nodes)
        self.oracle, self.texts, self.logits = oracle, [], []

    def propose(self, tokens, lengths):
        super().propose(tokens, lengths)
        self.texts += [sequence.tokens[:] for sequence in self._selected]
        return self.oracle.propose(tokens, lengths)

    def confidence(self):
        return None

    def _guess(self, *arguments):
        states = super()._guess(*arguments)
        self.logits += self.model.logits(states)
        return states

    def is_dense(self, model):
        """Compares each pass with a dense one."""
        dense = [dense_block_logits(model, self.model, text) for text in self.texts]
        pairs = zip(self.logits, dense, strict=True)
        return [torch.allclose(logits, right[: len(logits)], rtol=1e-3, atol=1e-3) for logits, right in pairs]


def decode(model, drafter, texts, **options):
    """Checks the texts and returns the statistics."""
    found, stats = generated(model, drafter, **{"tree": None, **options})
    ends = [length + options.get("count", NEW_TOKENS) for length in LENGTHS]
    expected = [text[:end] for text, end in zip(texts, ends, strict=True)]
    assert found == [text for text in expected for _ in range(options.get("n", 1))]
    if "n" not in options or "num_pages" in options:
        assert (stats.evictions > 0) == ("num_pages" in options)
    return stats


WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"page_size": 7, "num_pages": 14}, {}),
        ({"n": 3, "page_size": 4, "num_pages": 30}, {"is_causal": True}),
        ({"max_batch_tokens": 6, "page_size": 3}, WINDOWS),
        ({"count": 6}, {"block_size": 40, "rope_theta": 1e6, "num_key_value_heads": 1}),
        ({"tree": "auto"}, {}),  # the target verifies parts of proposals
    ],
)
def test_a_paged_pass_is_the_dense_one(model, texts, options, changes):
    recorder = Recorder(block_model(model, replace(DFLASH, **changes)), Oracle(texts, hit=0.8))
    stats = decode(model, recorder, texts, **options)
    if "tree" not in options:
        assert stats.mean_accepted > 1
        assert len(recorder.texts) == len(recorder.logits) == sum(s.decode_steps for s in stats.sequences)
    assert all(recorder.is_dense(model))


@pytest.mark.parametrize(
    ("options", "limit"), [({"n": 2, "page_size": 4, "num_pages": 24}, 1 << 28), ({"max_batch_tokens": 6}, 3000)]
)
def test_features_of_plain_steps_wait_for_the_next_proposal(model, texts, monkeypatch, options, limit):
    """The drafter proposes in every sixth step."""
    monkeypatch.setattr(waiting_features, "MAX_WAITING_BYTES", limit)

    class Seldom(Recorder):
        def propose(self, tokens, lengths):
            self.turn = getattr(self, "turn", -1) + 1
            assert self._waiting._num_bytes <= limit
            return super().propose(tokens, lengths) if self.turn % 6 == 5 else NoDrafter().propose(tokens, lengths)

    recorder = Seldom(block_model(model), Oracle(texts, hit=0.8))
    decode(model, recorder, texts, **options)
    assert len(recorder.texts) >= 8 and all(recorder.is_dense(model))


def test_half_precision_turns_by_the_same_angles(model):
    """Rounded frequencies would rotate keys at far positions by other angles."""
    features, positions = torch.randn(8, 2 * model.config.hidden_size), torch.arange(5000, 5008)
    exact = block_model(model).context(features, positions)
    half = block_model(model).to(torch.bfloat16).context(features, positions)
    for (keys, _), (rounded, _) in zip(exact, half, strict=True):
        torch.testing.assert_close(rounded.float(), keys, atol=0.1, rtol=0.05)


def test_checkpoints_are_saved_and_loaded(model, tmp_path):
    config = replace(DFLASH, is_causal=True, final_logit_softcapping=5.0, input_embedding_scale=2.0)
    drafter = block_model(model, config)
    drafter.save_pretrained(tmp_path, dtype=torch.float32)
    loaded = BlockDraftModel.from_pretrained(tmp_path, model)
    assert loaded.config == config and not loaded.training
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), drafter.parameters(), strict=True))
    states = torch.randn(4, 128)
    with torch.no_grad():
        expected = 5 * torch.tanh(model.lm_head(states) / 5)
    torch.testing.assert_close(loaded.logits(states), expected)


# The model's keys in z-lab's config.json for Qwen3-8B, with fewer layers.
PUBLISHED = json.loads(Path(__file__).with_name("published_heads.json").read_text(encoding="utf-8"))["DFlash"]
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def test_the_published_layout_is_read(model, tmp_path):
    config = BlockDraftConfig.from_dict(PUBLISHED)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 127, (0, 1, 1))
    assert config.rope_theta == 1e6 and config.window(0) is None
    drafter = block_model(model, config)
    state = drafter.state_dict()
    layers = [f"layers.{i}.{name}.weight" for i in range(2) for name in (*NORMS, *PROJECTIONS)]
    assert sorted(state) == sorted([*layers, "fc.weight", "hidden_norm.weight", "norm.weight"])
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    for i in range(2):
        part = {name: tensor for name, tensor in state.items() if (name in layers[:11]) == bool(i)}
        save_file(part, tmp_path / f"model-{i + 1:05}-of-00002.safetensors")
    loaded = BlockDraftModel.from_pretrained(tmp_path, model)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), drafter.parameters(), strict=True))
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    newer = {name: value for name, value in PUBLISHED.items() if name not in ("rope_theta", "rope_scaling")}
    assert BlockDraftConfig.from_dict({**newer, "rope_parameters": rope}).rope_theta == 5e5
    sliding = {**PUBLISHED, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048}
    assert [BlockDraftConfig.from_dict(sliding).window(i) for i in range(2)] == [2048, None]
    for name in CAUSAL:
        causal = {**sliding, "dflash_config": {**PUBLISHED["dflash_config"], name: True}}
        assert [BlockDraftConfig.from_dict(causal).window(i) for i in range(2)] == [2048, 0]
