"""Drafting by a model's own multi-token prediction layer: its text, and drafts that follow the layer."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.batches import paths_of
from support.heads import FORMS, random_head, write_layer
from support.heads import features_of as outputs_of_layers
from support.models import IS_5, VOCAB, greedy, lists, prompts_of, tiny

from pagedtree.integrations.transformers import MtpDrafter, MtpHead, generate, load_drafter

if not IS_5:
    pytest.skip("transformers 4.57 writes these models otherwise", allow_module_level=True)


@pytest.fixture(scope="module", params=FORMS)
def case(request, tmp_path_factory):
    model = FORMS[request.param][0]()
    head, folder = random_head(model, request.param), tmp_path_factory.mktemp(request.param)
    write_layer(model, head, request.param, folder)
    return request.param, model, head, folder


def features_of(model, text):
    with torch.no_grad():
        return model.get_decoder()(torch.tensor([text])).last_hidden_state[0]


def test_scores_match_the_layers_dense_pass(case):
    """A node's score equals the layer's dense pass over text and path."""
    name, model, head, folder = case
    drafter, chain = (load_drafter(folder, model, num_nodes=7, depth=3, width=width) for width in (2, 1))
    assert type(drafter) is MtpDrafter and chain.is_chain and not drafter.is_chain
    assert model.config._attn_implementation != "pagedtree"
    (prompt,), records = prompts_of((12,)), []
    text = greedy(model, prompt, 14)
    note = lambda result: records.append((result, drafter.confidence()))  # noqa: E731
    sequences, _ = generate(model, [prompt], drafter=drafter, max_new_tokens=14, on_step=note)
    assert lists(sequences) == [text]
    features, checked = features_of(model, text), 0
    assert torch.allclose(head.fuse(outputs_of_layers(model, text, (-1,))), features, atol=1e-4)
    for result, log_probs in records[1:-3]:
        root, paths = int(result.start[0]), paths_of(result.draft_tokens.tolist(), result.trees.parents.tolist())
        for node, path in enumerate(paths[1:], 1):
            states, joint = features[:root], 0.0
            tokens = [*text[1 : root + 1], *path]
            with torch.no_grad():
                for step, token in enumerate(path):
                    out = head(torch.tensor(tokens[: root + step]), states, torch.arange(root + step))
                    joint += float(head.logits(out[-1]).log_softmax(-1)[token])
                    states = torch.cat([states, out[-1:]])
            assert abs(joint - float(log_probs[node])) < 2e-3, (name, node)
            checked += 1
    assert checked > 20


EMBEDDINGS = [f"{prefix}embed_tokens.weight" for prefix in ("model.layers.3.", "", "model.")]


@pytest.mark.parametrize("name", [*EMBEDDINGS, "model.layers.3.shared_head.head.weight", "lm_head.weight"])
def test_a_checkpoint_with_another_embedding_or_output_layer(tmp_path, name):
    """The layer's weight has precedence over the folder's; the target's is shared if its values are equal."""
    model, is_output = FORMS["glm4_moe"][0](), "head" in name
    head, place = random_head(model, "glm4_moe"), 1 if is_output else 0
    write_layer(model, head, "glm4_moe", tmp_path)
    path, layer = tmp_path / "model.safetensors", head._of_target[place]
    tensors, weight = load_file(path), layer.weight.detach().clone()
    del tensors["model.layers.3.shared_head.head.weight" if is_output else "model.layers.3.embed_tokens.weight"]
    for matrix in (weight, torch.cat([weight, weight[:5]]), weight[:-5].double()):
        save_file({**tensors, name: matrix.contiguous()}, path)
        assert MtpHead.from_pretrained(tmp_path, model)._of_target[place] is layer
    save_file({**tensors, name: weight.flip(0).contiguous()}, path)
    loaded, tokens, states = MtpHead.from_pretrained(tmp_path, model), torch.arange(9), torch.randn(9, 128)
    with torch.no_grad():
        found, expected = loaded.logits(loaded(tokens, states, tokens)), head.logits(head(tokens, states, tokens))
        if not is_output:
            expected = head.logits(head(VOCAB - 1 - tokens, states, tokens))
        assert torch.equal(found.flip(-1) if is_output else found, expected)
    assert torch.equal(layer.weight, weight)
    save_file({**tensors, name: weight.flip(0)[:-1].contiguous()}, path)
    with pytest.raises(ValueError, match=f"{name}: expected 128 rows as the target's, got 127"):
        load_drafter(tmp_path, model)


def test_a_folder_of_a_layer_alone_has_nothing_else(tmp_path):
    model = FORMS["mimo"][0]()
    write_layer(model, random_head(model, "mimo"), "mimo", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    with pytest.raises(ValueError, match=r"norm\.weight: expected no such tensor"):
        save_file(tensors, path)
        load_drafter(tmp_path, model)
    del tensors["norm.weight"]
    save_file({**tensors, "lm_head.weight": model.lm_head.weight, "verifier_norm.weight": torch.ones(128)}, path)
    load_drafter(tmp_path, model)


REFUSED = [
    ("hnorm.weight", lambda t: t[:5], "expected .* got \\[5\\]"),
    ("mlp.experts.1.up_proj.weight", None, "expected a tensor .*experts.1.up_proj.weight, .* got none"),
    ("self_attn.kv_b_proj.weight_scale_inv", torch.ones(1), "expected no such tensor"),
    ("eh_proj.weight", lambda t: t.to(torch.float8_e4m3fn), "expected floating-point values of 16 bits or more"),
]


@pytest.mark.parametrize(("name", "changed", "message"), REFUSED)
def test_other_layers_are_refused(tmp_path, name, changed, message):
    model = FORMS["deepseek_v3"][0]()
    write_layer(model, random_head(model, "deepseek_v3"), "deepseek_v3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, name = load_file(path), f"model.layers.4.{name}"
    found = tensors.pop(name, None)
    if changed is not None:
        tensors[name] = changed if found is None else changed(found).contiguous()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message) as error:
        load_drafter(tmp_path, model)
    assert name in str(error.value)


def test_model_without_mtp_layers(tmp_path):
    model = tiny(0)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a draft head, or a model with MTP layers"):
        load_drafter(tmp_path, model)
    other = FORMS["glm4_moe"][0]()
    write_layer(other, random_head(other, "glm4_moe"), "glm4_moe", tmp_path / "glm")
    with pytest.raises(ValueError, match="a model with MTP layers"):  # after the third layer, where this has two
        load_drafter(tmp_path / "glm", model)
    drafter = MtpDrafter(random_head(other, "glm4_moe"))
    narrow = FORMS["deepseek_v3"][0]()
    with pytest.raises(ValueError, match="drafter: expected MTP layers of the target's hidden size 64"):
        generate(narrow, prompts_of((4,)), drafter=drafter, max_new_tokens=2)
    assert json.loads((tmp_path / "glm" / "config.json").read_text())["num_nextn_predict_layers"] == 1
