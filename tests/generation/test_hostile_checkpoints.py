"""EAGLE-3, block and Medusa checkpoints with any contents are refused by name before a module is made."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from dataclasses import MISSING

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import block_model
from support.models import tiny, tiny_eagle
from torch import nn

from pagedtree.generation.drafters import (
    BlockDraftConfig,
    BlockDraftModel,
    EagleHead,
    MedusaHeads,
    block_config,
    eagle_config,
)
from pagedtree.generation.drafters.checkpoint_config import CAUSAL
from pagedtree.generation.drafters.eagle_config import LAYER_IDS, EagleConfig
from pagedtree.generation.drafters.formats import rows_of

# An example, its class, and its weights' file.
KINDS = {
    "eagle": (tiny_eagle, EagleHead, "model.safetensors"),
    "block": (block_model, BlockDraftModel, "model.safetensors"),
    "medusa": (lambda model: MedusaHeads(128, 3, model.lm_head), MedusaHeads, "medusa.safetensors"),
}

# Values that are no size, number, flag ...
NAN, INF = math.nan, math.inf
LARGE = 7_000_000  # too large for these files alone
SIZE = ["2", "", True, 2.0, 1.5, -1, -(2**40), 0, LARGE, 2**31, 10**12, 10**30, NAN, [], [2], {}, {"a": 2}]
NUMBER = ["1", True, 0, -1, -0.5, NAN, INF, -INF, 10**30, [], [1.0], {}]
FLAG = ["true", 0, 1, 0.0, NAN, [], {}]
IDS = ["ab", True, 3, NAN, {}, ["0"], [0.0], [True], [None], [[0]], [-1], [2**40], [0, 10**6]]
OBJECT = ["x", True, 3, NAN, [], [1]]
WORD = ["other", 2, 0.5, NAN, [], [1], {}, {"a": 1}]

DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "vocab_size": 128,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 4,
    "selector_top_k": 4,
}

VALUES = {"integer": SIZE, "number": NUMBER, "flag": FLAG, "integers": IDS}


def of_rows(config):
    return {row.key: VALUES[row.kind] for row in rows_of(config).values() if row.kind in VALUES}


def others_than(only):
    values = ["other", "", 0.5, 2, True, False, [], [1], {}]
    return {
        key: [value for value in values if type(value) is not type(right) or value != right]
        for key, right in only.items()
    }


MEDUSA = {"hidden_size": SIZE, "num_heads": SIZE}
# Refused values; a dot leads into an object.
HOSTILE = {
    "eagle": {
        **of_rows(EagleConfig),
        **others_than(eagle_config.ONLY),
        **{f"eagle_config.{name}": values for name, values in others_than(eagle_config.OF_MODELOPT).items()},
        **{name: FLAG for name in eagle_config.FLAGS},
        **{f"eagle_config.{name}": [*FLAG, True] for name in ("norm_before_fc", "fc_norm")},
        "architectures": ["x", 3, {}, [1], ["EagleLlamaForCausalLM"], ["PEagleDraftModel"], [None]],
        "attention_bias": [*FLAG, True, 2, "2", 10**12],
        "eagle_config": OBJECT,
        "eagle_config.use_aux_hidden_state": [False, 0, "x", []],
        f"eagle_config.{LAYER_IDS}": [*IDS, [2], [0, 2], [0], [0, 1, 1]],
        "eagle_config.unknown": [1, "x", True, [1], {}],
        LAYER_IDS: IDS[:-1],  # ids of outputs have precedence
        "layer_types": ["x", 3, ["sliding_attention"], [1]],
        "num_aux_hidden_states": [*SIZE, 3],
        "num_hidden_layers": [2, 0, -1, 10**12, True, "1", []],
        "parallel_drafting": [True, 1],
        "partial_rotary_factor": [0.25, "x", NAN],
        "quantization_config": [{"bits": 4}, 1],
        "rope_scaling": OBJECT[:-1],
        "rope_scaling.factor": NUMBER,
        "rope_scaling.rope_type": ["yarn", *WORD],
        "rope_theta": NUMBER,
        "speculators_model_type": ["mtp", "dflash", 3],
        "transformer_layer_config": OBJECT,
        "what_is_this": [True, 1, "x", [], {}, False],
    },
    "block": {
        **of_rows(BlockDraftConfig),
        **others_than(block_config.ONLY),
        "architectures": ["x", 3, {}, [1], ["DSparkDraftModel"]],
        "block_size": [*SIZE, 1, 2000],
        "dflash_config": OBJECT,
        "dflash_config.attention_sink_bias": [True],
        "dflash_config.projector_type": ["domino", 1],
        "draft_vocab_size": [64, *SIZE],
        **dict.fromkeys(CAUSAL, FLAG),
        "layer_types": ["x", 3, ["linear_attention"] * 2, ["full_attention"], [1, 2], {}],
        "mask_token_id": [value for value in SIZE if value != 0] + [128],
        "rope_parameters": OBJECT[:-1],
        "rope_parameters.rope_type": ["yarn", *WORD],
        "rope_scaling": OBJECT[:-1],
        "rope_theta": NUMBER,
        "sliding_window": [value for value in SIZE if value != LARGE],
        "target_hidden_size": [64, "x", 10**12],
        "target_layer_ids": [*IDS, [], [2], [0], [0, 2]],
        "use_sliding_window": [True, 1],
        "what_is_this": [True, 1, "x", [], {}, False],
    },
    "medusa": {
        **MEDUSA,
        "medusa_fc_bias": [True],
        "model_type": ["llama", 3, []],
        "num_hidden_layers": [2],
        "what_is_this": [True, 1, "x", [], {}, False],
    },
}
CONFIGS = {"eagle": EagleConfig, "block": BlockDraftConfig}
NEEDED = {kind: [row.key for row in rows_of(CONFIGS[kind]).values() if row.default is MISSING] for kind in CONFIGS}
NEEDED["eagle"] = [key for key in NEEDED["eagle"] if key != LAYER_IDS]
NEEDED["medusa"] = [*MEDUSA]


class Folder:
    def __init__(self, kind, folder, model):
        make, self.reader, weights = KINDS[kind]
        self.kind, self.folder, self.model = kind, folder, model
        self.head = make(model)
        self.head.save_pretrained(folder, dtype=torch.float32)
        self.path, self.weights = folder / "config.json", folder / weights
        self.config, self.tensors = json.loads(self.path.read_text()), load_file(self.weights)

    def load(self):
        return self.reader.from_pretrained(self.folder, self.model)

    def write(self, entries=None, **tensors):
        """Replaces entries and tensors; None omits a tensor."""
        self.path.write_text(json.dumps({**self.config, **(entries or {})}))
        if tensors:
            found = {**self.tensors, **tensors}
            save_file({name: t.contiguous() for name, t in found.items() if t is not None}, self.weights)

    def refuses(self, message, error=ValueError):
        with pytest.raises(error, match=message) as found:
            self.load()
        return str(found.value)


@pytest.fixture(params=KINDS)
def case(request, model, tmp_path):
    return Folder(request.param, tmp_path, model)


@pytest.fixture
def eagle(model, tmp_path):
    return Folder("eagle", tmp_path, model)


@pytest.fixture
def nothing_is_made(case, monkeypatch):

    def made(*args, **options):
        raise AssertionError("a module is made")

    monkeypatch.setattr(case.reader, "__init__", made)


def changed(config, key, value):
    outer, _, inner = key.rpartition(".")
    if key in config.get("dflash_config", {}):
        outer, inner = "dflash_config", key
    if not outer:
        return {**config, key: value}
    return {**config, outer: {**(config.get(outer) or {}), inner: value}}


def test_hostile_values_are_refused_by_name(case, nothing_is_made):
    for key, values in HOSTILE[case.kind].items():
        for value in values:
            case.write(changed(case.config, key, value))
            message = case.refuses(None)
            assert key.rpartition(".")[2] in message and str(case.folder) in message, (key, value, message)
            assert len(message) < 500, (key, value)


LLAMA3 = {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}
LLAMA3["original_max_position_embeddings"] = 64
CONTRADICTIONS = {
    "eagle": [
        ({"head_dim": 7}, "head_dim: expected an even number"),
        ({"num_attention_heads": 3, "head_dim": None}, "head_dim: expected an integer"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm: expected false beside norm_before_fc"),
        ({"speculators_model_type": "peagle"}, "architectures: expected a list of PEagleSpeculator"),
        ({"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"]}, "mask_token_id: .* got nothing"),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 1.0}}, "rope_scaling: expected null"),
        ({"rope_scaling": LLAMA3}, "high_freq_factor: expected a number above low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor: expected a number above 0, got nothing"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: factor: expected no such entry"),
    ],
    "block": [
        ({"head_dim": 7}, "head_dim: expected an even number"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of"),
        ({"architectures": ["DFlash2DraftModel"]}, "vocab_size: expected an integer .*, got nothing"),
        ({**DFLASH2, "conv_group_size": 3}, "conv_group_size: expected a divisor of hidden_size 128, got 3"),
        ({**DFLASH2, "conv_kernel_size": 99}, "conv_kernel_size: expected at most block_size 6, got 99"),
        ({**DFLASH2, "selector_top_k": 129}, "selector_top_k: expected at most vocab_size 128 and 1024, got 129"),
        ({**DFLASH2, "draft_vocab_size": 64}, "draft_vocab_size: expected vocab_size 128, as the selector's"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type: expected one of dflash, dflash2"),
        ({"speculators_model_type": "dflash2"}, "architectures: expected a list of DFlash2DraftModel"),
        ({"speculators_model_type": "dflash"}, "aux_hidden_state_layer_ids: expected the inputs of layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling: rope_type: expected one of default"),
        ({"is_causal": False, "causal_head": True}, "is_causal: expected the same as causal_head true, got False"),
        ({"bidirectional": False}, "bidirectional: expected a known entry, .* which tokens see each other; keep it"),
    ],
    "medusa": [],
}


def test_entries_that_contradict_each_other(case, nothing_is_made):
    """Also entries that are needed."""
    for changes, message in CONTRADICTIONS[case.kind]:
        case.write(changes)
        case.refuses(message)
    for key in NEEDED[case.kind]:
        case.write(changed(case.config, key, None))
        case.refuses(f"{key}: expected .*, got nothing")


BROKEN = [b"", b"{", b"[]", b"3", b"null", b'"x"', b"NaN", b"\xff\xfe{}", b'{"a": "\xff"}']
BROKEN += [b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b" " * (1 << 24) + b"{}"]


@pytest.mark.parametrize("contents", BROKEN, ids=lambda contents: repr(contents[:12]))
def test_files_that_hold_no_object_are_refused(case, nothing_is_made, contents):
    case.path.write_bytes(contents)
    case.refuses(r"config\.json")


def test_files_that_are_not_there(case, nothing_is_made):
    case.path.unlink()
    case.refuses(r"config\.json", FileNotFoundError)
    case.path.mkdir()
    case.refuses(r"config\.json", OSError)
    case.path.rmdir()
    case.path.write_text("\ufeff" + json.dumps(case.config), encoding="utf-8")  # a byte order mark is valid
    case.weights.unlink()
    case.refuses("safetensors", FileNotFoundError)


def test_weights_of_another_form_are_refused(case, nothing_is_made):
    tensors = case.tensors
    name = next(name for name in sorted(tensors) if tensors[name].is_floating_point() and tensors[name].ndim > 1)
    tensor = tensors[name]
    for new in (tensor[:-1], tensor[None], tensor[..., :0], tensor.to(torch.int8), tensor.to(torch.float8_e4m3fn)):
        case.write(**{name: new})
        case.refuses(f"safetensors: {name}: expected")
    case.write(**{name: None})
    case.refuses(f"expected a tensor {name}, .*, got none")
    case.write(**{"more.weight": torch.zeros(3)})
    case.refuses(r"more\.weight: expected no such tensor")


def test_broken_weights_are_refused(case, nothing_is_made):
    raw = case.weights.read_bytes()
    for contents in (b"", raw[:7], raw[: len(raw) // 2], raw[:-1], raw + b"x", b"junk" * 99, b"\xff" * 99):
        case.weights.write_bytes(contents)
        case.refuses("safetensors: expected a file in the format of safetensors")


def test_a_tensor_in_two_files_is_refused(eagle):
    eagle.weights.rename(eagle.folder / "model-1.safetensors")
    eagle.load()
    shutil.copy(eagle.folder / "model-1.safetensors", eagle.folder / "model-2.safetensors")
    eagle.refuses(r"model-2.safetensors: expected each tensor once")


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_weights(eagle, monkeypatch):
    path, tensors, trap = eagle.folder / "pytorch_model.bin", eagle.tensors, Trap(eagle.folder / "trap")
    eagle.weights.unlink()
    torch.save(tensors, path)
    raw = path.read_bytes()
    assert torch.equal(eagle.load().fc.weight, eagle.head.fc.weight)
    name = "midlayer.mlp.gate_proj.weight"
    monkeypatch.setattr(EagleHead, "__init__", None)
    for value in (trap, 3, torch.zeros(1).expand(tensors[name].shape), tensors[name].to_sparse(), [tensors[name]]):
        torch.save({**tensors, name: value}, path)
        eagle.refuses(r"pytorch_model.bin: (midlayer.mlp.gate_proj.weight: )?expected")
    for contents in (b"", b"junk", raw[: len(raw) // 2], pickle.dumps(trap), pickle.dumps({"a": 1})):
        path.write_bytes(contents)
        eagle.refuses(r"pytorch_model.bin: expected tensors as torch.save writes them")
    for value in (tensors["fc.weight"], [1], {1: tensors["fc.weight"]}):
        torch.save(value, path)
        eagle.refuses(r"pytorch_model.bin: expected tensors by name")
    assert not trap.path.exists()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(64, 1).long(), r"d2t: expected \[draft_vocab_size\] = \[64\]"),
        (torch.zeros(0).long(), r"d2t: expected \[draft_vocab_size\] = \[64\]"),
        (torch.zeros(64), "d2t: expected integers"),
        (torch.full((64,), 65), "d2t: expected tokens of the target's 128, got 65..128"),
        (torch.full((64,), -64), "d2t: expected tokens of the target's 128"),
        (torch.full((64,), 2**63 - 1), "d2t: expected tokens of the target's 128"),
        (5 - torch.arange(64), "d2t: expected each of the target's tokens once at most, got 5 again"),
        (1 - torch.arange(64) % 2, "d2t: expected each of the target's tokens once at most, got 1 again"),
        (torch.zeros(64).long(), "t2d: expected the 64 tokens of d2t, got 64 that differ"),
    ],
)
def test_draft_tokens_that_the_target_lacks(eagle, ids, message):
    eagle.write(d2t=ids)
    eagle.refuses(message)


def test_many_draft_tokens_take_no_memory(eagle):
    """Output rows are copied for each draft token, and a file may claim any number."""
    for size in (None, 100_000):
        eagle.write({"draft_vocab_size": size}, d2t=-torch.arange(100_000))
        eagle.refuses("draft_vocab_size: expected vocab_size 128, or less .* got 100000")


def test_a_block_drafter_has_the_embedding_and_output_layer_of_the_target(model, tmp_path):
    block = Folder("block", tmp_path, model)
    ends = {"embed_tokens.weight": model.model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    for name, weight in ends.items():
        block.write(**{name: weight.detach().clone()})
        block.load()
        block.write(**{name: weight.detach().flip(0)})
        block.refuses(f"{name}: expected the target's values, which are used, got others")


def test_a_head_of_another_width_needs_its_own_layers(model, tmp_path, monkeypatch):
    narrow = tiny(0, hidden_size=64, num_attention_heads=1, num_key_value_heads=1)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 1, "vocab_size": 128}
    head = EagleHead({**sizes, "target_hidden_size": 128}, narrow.model.embed_tokens, narrow.lm_head, (0, 1))
    folder = Folder("eagle", tmp_path, model)
    head.save_pretrained(tmp_path, dtype=torch.float32)  # saves an output layer, no embedding
    folder.config, folder.tensors = json.loads(folder.path.read_text()), load_file(folder.weights)
    rows = torch.randn(128, 64)
    folder.write(**{"embed_tokens.weight": rows})
    assert torch.equal(folder.load().input_rows, rows)
    monkeypatch.setattr(EagleHead, "__init__", None)
    for name, tensors in (("embed_tokens.weight", {}), ("lm_head.weight", {"embed_tokens.weight": rows})):
        folder.write(**{**tensors, name: None})
        folder.refuses(f"{name}: expected it with hidden_size 64, the target's has width 128")


def test_a_target_without_an_output_layer_is_refused(case, model, monkeypatch):
    for layer in (None, nn.Identity()):
        monkeypatch.setattr(model, "get_output_embeddings", lambda layer=layer: layer)
        case.refuses("model: expected an output layer with weights")
