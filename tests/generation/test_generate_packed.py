"""`generate` on packed weights: the same texts, and when it packs."""

from __future__ import annotations

import threading
from functools import partial
from weakref import ref

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from generate_case import LENGTHS, NEW_TOKENS, lists, prompts_of, tiny
from packed_case import linear_layers, of_any_size, packed_layers  # noqa: F401 - a fixture
from safetensors.torch import load_file
from subject_case import Subject
from transformers import LlamaForCausalLM

from pagedtree.integrations.transformers import NgramDrafter, generate, packed_weights
from pagedtree.integrations.transformers.packed_weights import check_packable
from pagedtree.integrations.transformers.turns import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")


def dense_weights(model):
    """References to them that do not hold them."""
    return [ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]


NETWORKS = {"draft model": 8, "combined": 8, "EAGLE": 8, "block": 15}


@pytest.mark.parametrize("name", ["none", "ngram tree", "medusa", *NETWORKS])
def test_text_is_that_of_dense_weights(name):
    subject = Subject(partial(tiny, 0))
    model, drafter, texts, seen = subject.model, subject.drafter(name), subject.texts, []
    weights = dense_weights(model)
    networks = [net for net in getattr(drafter, "networks", ()) if isinstance(net, nn.Module)]

    def on_step(result):
        assert packed_layers(model) == linear_layers(model) and not any(weight().numel() for weight in weights)
        seen.append(sum(len(packed_layers(net)) for net in networks))

    options = {"drafter": drafter, "max_new_tokens": NEW_TOKENS, "on_step": on_step, "pack_weights": True}
    sequences, _ = generate(model, prompts_of(LENGTHS), **options)
    assert lists(sequences) == texts
    assert set(seen) == {NETWORKS.get(name, 0)}
    assert not packed_layers(model) and not any(packed_layers(net) for net in networks)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_new_tokens": 64, "n": 4}, True),
        ({"max_new_tokens": 64, "n": 4, "pack_weights": False}, False),
        ({"max_new_tokens": 64, "n": 3}, False),
        ({"max_new_tokens": 63, "n": 4}, False),
        ({"max_new_tokens": 32, "n": 8, "max_sequences": 4}, True),
        ({"max_new_tokens": 64, "drafter": NgramDrafter(num_nodes=4)}, True),
        ({"max_new_tokens": 2, "pack_weights": True}, True),
    ],
)
def test_generate_packs_where_it_pays(options, expected):
    model, found = tiny(0), set()

    def callback(sequence, tokens):
        found.add(packed_layers(model) == linear_layers(model))
        return True

    generate(model, prompts_of((5,)), callback=callback, **options)
    assert found == {expected} and not packed_layers(model)


@pytest.mark.parametrize("load", ["as stored", "converted", "state", "assigned"])
def test_a_loaded_model_is_packed_and_not_copied(load, tmp_path):
    """transformers leaves weights in a private mapping of their file, where no conversion copies them."""
    tiny(0).save_pretrained(tmp_path)
    if load in ("as stored", "converted"):
        dtype = torch.float32 if load == "as stored" else torch.bfloat16
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    else:
        model = tiny(1)
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=load == "assigned")
    weights, found = dense_weights(model), []

    def callback(sequence, tokens):
        found.append((packed_layers(model), sum(weight().numel() for weight in weights)))
        return True

    generate(model, prompts_of((5,)), max_new_tokens=64, n=4, callback=callback)
    assert found[0] == (linear_layers(model), 0) and all(weight().numel() for weight in weights)


@pytest.mark.parametrize("part", ["", "model.layers.1.mlp"])
def test_packing_and_unpacking_wait_for_calls_in_other_threads(part):
    """The other call may be of another model that shares a layer."""
    model, packed, leave, unpacked = tiny(0), threading.Event(), threading.Event(), threading.Event()
    module = model.get_submodule(part)

    def hold():
        with packed_weights(model):
            packed.set()
            leave.wait(60)
        unpacked.set()

    thread, check = threading.Thread(target=hold), threading.Thread(target=check_packable, args=(model,))
    with in_turn(module):
        thread.start()
        check.start()
        assert not packed.wait(0.1) and not packed_layers(model) and check.is_alive()
    assert packed.wait(60)
    with in_turn(module):
        leave.set()
        assert not unpacked.wait(0.1) and packed_layers(model) == linear_layers(model)
    assert unpacked.wait(60) and not packed_layers(model)
    thread.join()
    check.join()


NO_LAYERS = r"pack_weights: expected a model with linear layers .* on the CPU in .*torch.float32 that are large enough"


@pytest.mark.parametrize(
    ("model", "pack_weights", "message"),
    [
        (tiny(0), "yes", "pack_weights: expected True, False or None, got 'yes'"),
        (tiny(0).double(), True, f"{NO_LAYERS}, got none in LlamaForCausalLM"),
    ],
)
def test_refusals(model, pack_weights, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts_of((3,)), max_new_tokens=2, pack_weights=pack_weights)
