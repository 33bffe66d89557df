"""The benchmark's widened target: its outputs are the toy's, and so are the drafts that it accepts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ROOT / "examples" / "checkpoints"
SMALL = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 12, "num_key_value_heads": 3}
PROMPT = list(range(40, 60)) * 2

transformers = pytest.importorskip("transformers", minversion="4.57")
if not (CHECKPOINTS / "target" / "model.safetensors").exists():
    pytest.skip("the toy's models are not here", allow_module_level=True)


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("bench_wide")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def models(bench):
    narrow, draft = (
        transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    for model in (narrow, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return SimpleNamespace(narrow=narrow, draft=draft, wide=bench.widened(narrow, SMALL))


@torch.no_grad()
def test_a_widened_target_gives_the_same(models):
    tokens = torch.randint(0, 2048, (2, 70), generator=torch.Generator().manual_seed(3))
    narrow, wide = (model(tokens, output_hidden_states=True) for model in (models.narrow, models.wide))
    torch.testing.assert_close(wide.logits, narrow.logits, rtol=1e-4, atol=1e-4)
    for before, after in zip(narrow.hidden_states, wide.hidden_states, strict=True):
        torch.testing.assert_close(after[..., :256], before, rtol=1e-4, atol=1e-4)
        assert not after[..., 256:].any()
    assert models.wide.model.norm.variance_epsilon == models.narrow.model.norm.variance_epsilon / 4
    texts = [model.generate(tokens[:1], do_sample=False, max_new_tokens=48) for model in (models.narrow, models.wide)]
    assert torch.equal(*texts)


def test_no_matrix_of_a_widened_target_is_sparse(models):
    weights = {name: weight for name, weight in models.wide.named_parameters() if weight.ndim == 2}
    assert (
        len(weights) == 1 + 4 * 7 and models.wide.get_output_embeddings().weight is weights["model.embed_tokens.weight"]
    )
    for name, weight in weights.items():
        assert weight.dtype == torch.float32 and weight.layout == torch.strided and torch.isfinite(weight).all()
        if "embed" not in name:
            assert weight.count_nonzero() > weight.numel() / 4, name


def test_widening_needs_room_for_the_heads(bench, models):
    with pytest.raises(ValueError, match="at least 2 to a key-value head, got 1"):
        bench.widened(models.narrow, {"hidden_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4})


def test_drafters_of_the_demo_draft_for_the_widened_target(bench, models):
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / "target")
    tokenizer.pad_token_id = 0
    makers = bench.drafters(models.narrow, models.draft)
    narrow, wide = (
        bench.candidates(target, models.draft, tokenizer, [PROMPT], 40, makers, 256)
        for target in (models.narrow, models.wide)
    )
    assert list(narrow) == list(wide) and {"transformers, assisted", "pagedtree, plain"} < set(wide)
    (text,), _ = wide["pagedtree, plain"]()
    assert len(text) == 40
    for name in wide:
        (own, own_stats), (other, other_stats) = narrow[name](), wide[name]()
        assert own == other == [text], name
        if name.endswith(("chain", " tree")):  # what is chosen depends on the time
            assert own_stats.steps == other_stats.steps, name
            assert other_stats.tokens_per_step > 1, name


def test_a_library_that_is_missing_or_fails_is_named(bench, monkeypatch):
    peers = importlib.import_module("wide_peers")

    def broken(models):
        raise RuntimeError("no such device\nand more")

    def working(models):
        return {"": lambda prompt, count: [prompt[:count]], ", prompt lookup": lambda prompt, count: [[0] * count]}

    known = {"A": (("torch",), broken), "B": (("not_there",), working), "C": (("torch",), working)}
    monkeypatch.setattr(peers, "PEERS", known)
    found, absent = peers.ready(None)
    assert list(found) == ["C", "C, prompt lookup"]
    assert absent == {"A": "RuntimeError: no such device", "B": "not_there not installed"}
    assert peers.ready(None, ["b"]) == ({}, {"B": "not_there not installed"})
    assert peers.ready(None, device="cuda")[0] == {}
