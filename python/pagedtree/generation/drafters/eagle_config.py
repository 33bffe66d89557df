"""The config.json of an EAGLE-3 head, in the format of SGLang and vLLM or of speculators."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedtree._arguments import refusal
from pagedtree.generation.drafters.checkpoint_config import CAUSAL, HARMLESS, ConfigEntries
from pagedtree.generation.drafters.formats import check_heads, entry, head_dim_of, read_rows, rows_of
from pagedtree.generation.drafters.layers import LayerSizes, layer_shapes
from pagedtree.generation.drafters.rotary_config import Rotary

ARCHITECTURE = "LlamaForCausalLMEagle3"  # SGLang's name
# Other names of this architecture: vLLM's, speculators' and EAGLE's training code.
OTHERS = ("Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "LlamaForCausalLM")
ARCHITECTURES = (ARCHITECTURE, *OTHERS)
PARALLEL_ARCHITECTURES = ("PEagleSpeculator", "PEagleDraftModel")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# ModelOpt's entries for its other heads, and entries with only one supported value.
OF_MODELOPT: dict[str, Any] = {
    "parallel_draft_step": 1,
    "position_embedding_type": "rope",
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "bias": False,
    "qkv_bias": False,
    "use_sliding_window": False,
    **dict.fromkeys(CAUSAL, True),
    "logit_scale": 1.0,
}
# Kinds of speculators and their layers; Qwen 3's norm queries and keys.
KINDS = ("eagle3", "peagle")
LAYER_KINDS = ("llama", "qwen3")
MAX_LAYERS = 1024
OF_SPECULATORS = ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config")
# Entries of the rotary embedding.
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")
# Windows that no layer uses.
UNUSED = ("sliding_window",)
# Columns of `fc`.
NUM_LAYERS_READ = f"layers of {LAYER_IDS}"
FEATURES = f"{NUM_LAYERS_READ} * target_hidden_size"


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerSizes):
    """Sizes and variant of an EAGLE-3 head; fields have the names of config.json.

    Attributes:
        where: the file's name in messages.
        entries: the file's entries, with speculators' transformer_layer_config merged in.
        target_hidden_size: hidden size of the target's layers.
        draft_vocab_size: None: not given.
        norm_before_residual: whether the residual is the state after its norm. norm_before_fc, fc_norm, norm_output:
            see `EagleHead`.
        by_output, by_input: target layers that are read, by outputs or inputs; () = not given. num_layers_read: their
            number; None: not given.
        has_head_norms: whether queries and keys have a norm, as in Qwen 3.
        mask_token_id: P-EAGLE's placeholder for unknown tokens; None for EAGLE-3.
    """

    where: str
    entries: dict[str, Any]
    hidden_size: int = entry("integer", place="layer")
    intermediate_size: int = entry("integer", place="layer")
    num_attention_heads: int = entry("integer", place="layer")
    num_key_value_heads: int = entry("integer", lambda found: found["num_attention_heads"], place="layer")
    head_dim: int = entry("integer", head_dim_of, place="layer")
    vocab_size: int = entry("integer", place="layer")
    rms_norm_eps: float = entry("number", 1e-6, place="layer")
    target_hidden_size: int = entry("integer", lambda found: found["hidden_size"])
    draft_vocab_size: int | None = entry("integer", None)
    tie_word_embeddings: bool = entry("flag", False)
    by_output: tuple[int, ...] = entry("integers", key=LAYER_IDS, place="eagle_config", least=0)
    by_input: tuple[int, ...] = entry("integers", key=LAYER_IDS, least=0)
    num_layers_read: int | None = entry("integer", None, key="num_aux_hidden_states")
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    rotary: Rotary
    num_hidden_layers: int
    has_head_norms: bool
    attention_bias: bool
    mask_token_id: int | None

    @classmethod
    def read(cls, top: ConfigEntries) -> EagleConfig:
        """Raises ValueError for unknown or unsupported entries."""
        is_parallel = top.word("speculators_model_type", KINDS, "eagle3") == "peagle"
        top.words("architectures", PARALLEL_ARCHITECTURES if is_parallel else ARCHITECTURES)
        layer, eagle = top.section("transformer_layer_config"), top.section("eagle_config")
        is_nested = bool(layer.entries)  # as speculators writes it
        has_head_norms = is_nested and layer.word("model_type", LAYER_KINDS, "llama") == "qwen3"
        if not is_nested:
            layer = top
        for section in (top, eagle):
            section.only(use_aux_hidden_state=True, **OF_MODELOPT)
        values = read_rows(cls, top, layer=layer, eagle_config=eagle)
        check_heads(layer, values)
        flags: dict[str, Any] = {name: _flag(name, top, eagle) for name in FLAGS}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            top.refuse("fc_norm", "false beside norm_before_fc")
        config = cls(
            where=top.where,
            entries={name: v for name, v in {**layer.entries, **top.entries}.items() if name not in OF_SPECULATORS},
            rotary=Rotary.of(layer),
            num_hidden_layers=layer.integer("num_hidden_layers", 1, most=MAX_LAYERS if is_nested else 1),
            has_head_norms=has_head_norms,
            attention_bias=is_nested and layer.flag("attention_bias", False),
            mask_token_id=top.integer("mask_token_id", least=0) if is_parallel else None,
            **values,
            **flags,
        )
        if config.mask_token_id is not None and config.mask_token_id >= config.vocab_size:
            top.refuse("mask_token_id", f"one of the {config.vocab_size} tokens")
        layer.only(attention_bias=config.attention_bias, **ONLY)
        layer.words("layer_types", ["full_attention"])
        eagle.refuse_others()
        layer.refuse_others({*HARMLESS, *UNUSED, *(() if layer is top else ("tie_word_embeddings",))})
        top.refuse_others({*HARMLESS, *UNUSED})
        return config

    def to_entries(self) -> dict[str, Any]:
        """Returns config.json's entries for SGLang, vLLM and `read`, except entries that follow from the weights; in
        speculators' format for Qwen 3 layers, several layers, biases and P-EAGLE."""
        values = vars(self)
        layer = {"model_type": "qwen3" if self.has_head_norms else "llama", "hidden_act": "silu"}
        of_layer = [name for name, row in rows_of(type(self)).items() if row.place == "layer"]
        layer |= {name: values[name] for name in (*of_layer, "num_hidden_layers", "attention_bias")}
        rest = {"tie_word_embeddings": False, **{name: values[name] for name in ("target_hidden_size", *FLAGS)}}
        is_plain = self.num_hidden_layers == 1 and not (self.has_head_norms or self.attention_bias)
        if is_plain and self.mask_token_id is None:
            return {**self.entries, "architectures": [ARCHITECTURE], **layer, **rest}
        kind, architecture = "eagle3", "Eagle3DraftModel"
        if self.mask_token_id is not None:
            kind, architecture, rest["mask_token_id"] = "peagle", "PEagleDraftModel", self.mask_token_id
        nested = {**{name: self.entries[name] for name in ROTARY if name in self.entries}, **layer}
        names = {"architectures": [architecture], "speculators_model_type": kind}
        return {**names, "transformer_layer_config": nested, **rest}

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the target layers, of `num_layers`, whose outputs are read. ValueError without them."""
        layers = self.by_output  # SGLang's
        if not layers:  # vLLM's, and the default of both
            layers = tuple(layer - 1 for layer in self.by_input or (2, num_layers // 2, num_layers - 3))
        if not all(0 <= layer < num_layers for layer in layers):
            wanted = f"outputs of the target's layers 0..{num_layers - 1}, or at the top inputs of 1..{num_layers}"
            raise refusal(f"{self.where}: {LAYER_IDS}", wanted, f"the outputs of {reprlib.repr(layers)}")
        if self.num_layers_read not in (None, len(layers)):
            raise refusal(f"{self.where}: num_aux_hidden_states", len(layers), self.num_layers_read)
        return layers

    def shapes(self, num_layers_read: int) -> dict[str, str]:
        """Returns each tensor's shape, with the names of `sizes` as factors."""
        of_layer = partial(layer_shapes, bias=self.attention_bias, has_norms=self.has_head_norms)
        first = {"hidden_norm.weight": "hidden_size", **of_layer("2 * hidden_size")}
        shapes = {"fc.weight": f"hidden_size, {FEATURES}", "norm.weight": "hidden_size", "d2t": "draft_vocab_size"}
        shapes |= {f"midlayer.{name}": shape for name, shape in first.items()}
        for i in range(1, self.num_hidden_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer().items()}
        shapes |= {"embed_tokens.weight": "vocab_size, hidden_size", "lm_head.weight": "draft_vocab_size, hidden_size"}
        if self.norm_before_fc:
            shapes["input_norm.weight"] = FEATURES
        if self.mask_token_id is not None:
            shapes["mask_hidden"] = f"1, 1, {FEATURES}"
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": "target_hidden_size" for i in range(num_layers_read)}
        return shapes


def _flag(name: str, top: ConfigEntries, inner: ConfigEntries) -> bool:
    """Returns a flag at the top of the file or in eagle_config, as in NVIDIA's heads; False without an entry."""
    value = top.flag(name, False)
    flag = inner.flag(name, value)
    if name in top and flag != value:
        inner.refuse(name, f"the value at the top, {json.dumps(value)}")
    return flag
