"""Draft heads load from folders of a known format; other folders are refused in one sentence."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from support.batches import paths_of
from support.devices import default_dtype
from support.heads import (
    DFLASH2,
    SPECULATORS,
    block_model,
    causal_attention,
    features_of,
    head_of_speculators,
    parallel_head,
)
from support.models import VOCAB, greedy, lists, prompts_of, tiny, tiny_eagle

from pagedtree.generation.drafters import BlockDrafter, EagleDrafter, MedusaDrafter, MedusaHeads, ParallelEagleDrafter
from pagedtree.integrations.transformers import generate, load_drafter


@pytest.fixture(scope="module")
def texts(model):
    return [greedy(model, prompt) for prompt in prompts_of((5, 12))]


def medusa_of(model, folder, name="medusa_lm_head.safetensors", prefix="", count=3):
    """Writes Medusa's own files, with an output layer in each head."""
    torch.manual_seed(5)
    tensors = {}
    for i in range(count):
        tensors[f"{prefix}{i}.0.linear.weight"] = torch.randn(128, 128) * 0.05
        tensors[f"{prefix}{i}.0.linear.bias"] = torch.randn(128) * 0.05
        tensors[f"{prefix}{i}.1.weight"] = torch.randn(VOCAB, 128)
    if name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "4.31.0"}))
    return tensors


FOLDERS = {
    "EAGLE-3": (lambda m, p: tiny_eagle(m).save_pretrained(p, torch.float32), EagleDrafter),
    "eagle3": (lambda m, p: head_of_speculators(m).save_pretrained(p, torch.float32), EagleDrafter),
    "peagle": (lambda m, p: parallel_head(m).save_pretrained(p, torch.float32), ParallelEagleDrafter),
    "DFlash": (lambda m, p: block_model(m).save_pretrained(p, torch.float32), BlockDrafter),
    "DFlash 2": (lambda m, p: block_model(m, DFLASH2).save_pretrained(p, torch.float32), BlockDrafter),
    "Medusa": (medusa_of, MedusaDrafter),
    "our Medusa": (lambda m, p: MedusaHeads(128, 3, m.lm_head).save_pretrained(p), MedusaDrafter),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_format_is_found(model, texts, tmp_path, name):
    """Weights keep their bits under another default dtype."""
    make, kind = FOLDERS[name]
    make(model, tmp_path)
    with default_dtype(torch.bfloat16):
        drafter = load_drafter(tmp_path, model)
    assert type(drafter) is kind and drafter.max_nodes == 16 and not drafter.is_chain
    sequences, _ = generate(model, prompts_of((5, 12)), drafter=drafter, max_new_tokens=20)
    assert lists(sequences) == texts
    if kind is MedusaDrafter:
        with pytest.raises(ValueError, match="width: not with Medusa heads"):
            load_drafter(tmp_path, model, width=1)
    other = load_drafter(tmp_path, model, num_nodes=4, **{} if kind is MedusaDrafter else {"width": 1})
    assert other.max_nodes == 4 and other.is_chain == (kind is not MedusaDrafter)
    found = drafter.networks[0].state_dict()
    for key, value in other.networks[0].state_dict().items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value)


def test_levels_of_a_parallel_head_are_independent(model, texts):
    """A level depends on the text and unknown tokens, not on other levels."""
    head, records = parallel_head(model), []
    drafter = ParallelEagleDrafter(head, num_nodes=9, depth=3, width=4)
    note = lambda result: records.append((result, drafter.confidence()))  # noqa: E731
    generate(model, prompts_of((5, 12))[1:], drafter=drafter, max_new_tokens=8, tree=None, on_step=note)
    features, checked = features_of(model, texts[1], (0, 1)), 0
    for result, log_probs in records[1:]:
        if result.trees.max_nodes < 9 or len(result.draft_tokens) < 9:
            continue
        root = int(result.start[0])
        tokens = torch.tensor([*texts[1][1 : root + 1], 3, 3])
        fused = torch.cat([head.fuse(features[:root]), head.unknown_state().expand(2, -1)])
        logits = head.logits(head(tokens, fused, torch.arange(root + 2), causal_attention)[-3:])
        levels = logits.detach().log_softmax(-1)
        for node, path in enumerate(paths_of(result.draft_tokens.tolist(), result.trees.parents.tolist())):
            joint = sum(float(levels[depth, token // 2]) for depth, token in enumerate(path))
            assert abs(joint - float(log_probs[node])) < 1e-3
            checked += 1
    assert checked >= 16


def test_a_parallel_drafter_needs_a_parallel_head(model):
    with pytest.raises(ValueError, match="expected one of P-EAGLE, with mask_hidden, got one of EAGLE-3"):
        ParallelEagleDrafter(tiny_eagle(model))


@pytest.mark.parametrize(
    ("name", "prefix"), [("medusa_lm_head.safetensors", "medusa_head."), ("medusa_lm_head.pt", "")]
)
def test_logits_of_published_medusa_heads(model, tmp_path, name, prefix):
    tensors = {key.removeprefix(prefix): t for key, t in medusa_of(model, tmp_path, name, prefix, count=5).items()}
    heads = MedusaHeads.from_pretrained(tmp_path, model)
    assert heads.num_heads == 5  # the published config says two, but its authors load five
    states = torch.randn(4, 128)
    for i in range(5):
        inner = torch.nn.functional.linear(states, tensors[f"{i}.0.linear.weight"], tensors[f"{i}.0.linear.bias"])
        expected = (states + torch.nn.functional.silu(inner)) @ tensors[f"{i}.1.weight"].T
        torch.testing.assert_close(heads(states)[:, i], expected, rtol=1e-5, atol=1e-5)
    heads.save_pretrained(tmp_path / "again", torch.float32)
    assert torch.equal(MedusaHeads.from_pretrained(tmp_path / "again", model)(states), heads(states))


REFUSED = [
    ("EAGLE-3", dict(architectures=["Eagle2Model"]), "architectures: expected a draft head: EAGLE-3"),
    ("EAGLE-3", dict(architectures=["LlamaForCausalLM"], draft_vocab_size=None), "expected a draft head, or a model"),
    ("EAGLE-3", dict(speculators_model_type="dspark"), "speculators_model_type: expected one of eagle3, peagle,"),
    ("EAGLE-3", dict(scale_emb=2.0), "scale_emb: expected no such entry"),
    ("Medusa", dict(medusa_num_layers=2), "medusa_num_layers: expected 1"),
    ("Medusa", dict(medusa_num_heads=4), "medusa_num_heads: expected at most the 3 heads of the file, got 4"),
    ("Medusa", dict(medusa_choices=[1]), "medusa_choices: expected no such entry"),
]


@pytest.mark.parametrize(("name", "changed", "message"), REFUSED)
def test_other_folders_are_refused(model, tmp_path, name, changed, message):
    FOLDERS[name][0](model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=message) as error:
        load_drafter(tmp_path, model)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("bias", [None, torch.zeros(())])
def test_first_heads_without_sizes_are_refused(model, tmp_path, bias):
    tensors = {**medusa_of(model, tmp_path), "0.0.linear.bias": bias}
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=r"expected tensors 0.0.linear.bias and 0.1.weight of Medusa's first head"):
        MedusaHeads.from_pretrained(tmp_path, model)


def test_the_verifier_is_named(model, tmp_path):
    head_of_speculators(model).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **SPECULATORS}))
    other = tiny(0, hidden_size=64, num_attention_heads=1, num_key_value_heads=1)
    with pytest.raises(ValueError, match=r"target's 64, got 128 \(the folder names somebody/their-model as its target"):
        load_drafter(tmp_path, other)
