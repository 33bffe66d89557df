"""Registers heads' checkpoints by config.json."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from support.heads import block_model
from support.models import tiny, tiny_eagle

from calls import Call, valid_call
from pagedtree.generation.drafters import BlockDraftModel, EagleHead, MedusaHeads

# Entries of others' files.
OF_OTHERS: dict[str, Any] = {
    "hidden_act": "silu", "max_position_embeddings": 2048, "num_hidden_layers": 1, "partial_rotary_factor": 1.0,
    "quantization_config": None, "rope_theta": 10000.0, "use_cache": True,
}  # fmt: skip


@cache
def _folder(kind: str) -> Any:
    """Saves a checkpoint; returns target, folder, config."""
    target, folder = tiny(0), tempfile.TemporaryDirectory()
    make = {"eagle": tiny_eagle, "block": block_model, "medusa": lambda model: MedusaHeads(128, 3, model.lm_head)}
    make[kind](target).save_pretrained(folder.name)
    return target, folder, json.loads((Path(folder.name) / "config.json").read_text())


def _loading(kind: str, heads: Any, **more: Any) -> Call:
    target, folder, config = _folder(kind)

    def load(config: Any) -> None:
        text = json.dumps(config, default=repr)  # for non-JSON values
        (Path(folder.name) / "config.json").write_text(text)
        heads.from_pretrained(folder.name, target)

    return Call(load, {"config": {**config, **more}})


@valid_call
def eagle_checkpoint() -> Call:
    scaling = {"rope_type": "linear", "factor": 2.0}
    return _loading("eagle", EagleHead, **OF_OTHERS, rope_scaling=scaling, layer_types=["full_attention"])


@valid_call
def block_checkpoint() -> Call:
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    fields = {"rope_scaling": None, "final_logit_softcapping": 3.0, "is_causal": True, "vocab_size": 128}
    return _loading("block", BlockDraftModel, **{**OF_OTHERS, **layers, **fields})


@valid_call
def medusa_checkpoint() -> Call:
    return _loading("medusa", MedusaHeads, torch_dtype="float32")
