"""The config.json of an EAGLE-3 head: in the form of SGLang and vLLM, or in that of speculators."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedtree.generation.drafters.checkpoint_config import HARMLESS, ConfigEntries
from pagedtree.generation.drafters.layers import layer_shapes, sizes_by_name
from pagedtree.generation.drafters.rotary_config import Rotary

__all__ = ["ARCHITECTURES", "EagleConfig"]

ARCHITECTURE = "LlamaForCausalLMEagle3"  # SGLang's name
# Of heads of this form: vLLM's, those of speculators, and what EAGLE's own training wrote.
ARCHITECTURES = (
    ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "LlamaForCausalLM",
)  # fmt: skip
PARALLEL_ARCHITECTURES = ("PEagleSpeculator", "PEagleDraftModel")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# What ModelOpt writes of its other heads.
OF_MODELOPT: dict[str, Any] = {
    "parallel_draft_step": 1, "position_embedding_type": "rope", "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False,
}  # fmt: skip
# The kinds that speculators names, and the layers that it makes for them; those of Qwen 3 norm queries and keys.
KINDS = ("eagle3", "peagle")
LAYER_KINDS = ("llama", "qwen3")
MAX_LAYERS = 1024
OF_SPECULATORS = ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config")
# Entries that tell the rotary embedding.
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")
# A window without a layer that has one.
UNUSED = ("sliding_window",)
# Columns of `fc`.
FEATURES = f"layers of {LAYER_IDS} * target_hidden_size"


@dataclass(frozen=True)
class EagleConfig:
    """The sizes of an EAGLE-3 head, and what is computed, by the names of its config.json.

    Attributes:
        where: what messages call the file.
        entries: as they stand in the file, those of speculators' transformer_layer_config among the others.
        target_hidden_size: of the target's layers.
        draft_vocab_size: None: not said.
        norm_before_residual: whether what stays of the state is it after its norm.
        norm_before_fc, fc_norm: whether the features are normed before they are fused: all layers together, or each
            layer for itself.
        norm_output: whether the state that a node's children read is what the output layer reads, after the last norm.
        by_output, by_input: the target's layers that are read, by their outputs or inputs; () = not said.
        num_layers_read: how many they are; None: not said.
        has_head_norms: whether queries and keys have a norm, as in Qwen 3.
        mask_token_id: of P-EAGLE, which guesses all tokens in one pass: the token that stands for those that are not
            known. None for EAGLE-3.
    """

    where: str
    entries: dict[str, Any]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_hidden_size: int
    draft_vocab_size: int | None
    rms_norm_eps: float
    rotary: Rotary
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    tie_word_embeddings: bool
    by_output: tuple[int, ...]
    by_input: tuple[int, ...]
    num_layers_read: int | None
    num_hidden_layers: int
    has_head_norms: bool
    attention_bias: bool
    mask_token_id: int | None

    @classmethod
    def read(cls, top: ConfigEntries) -> EagleConfig:
        """Raises ValueError for what the head does not compute, and for entries of which it is not known."""
        is_parallel = top.word("speculators_model_type", KINDS, "eagle3") == "peagle"
        top.words("architectures", PARALLEL_ARCHITECTURES if is_parallel else ARCHITECTURES)
        layer, has_head_norms = top.section("transformer_layer_config"), False
        is_nested = bool(layer.entries)  # as speculators writes it
        if is_nested:
            has_head_norms = layer.word("model_type", LAYER_KINDS, "llama") == "qwen3"
        else:
            layer = top
        hidden, heads = layer.integer("hidden_size"), layer.integer("num_attention_heads")
        head_dim = layer.integer("head_dim", hidden // heads if hidden % heads == 0 else None)
        if head_dim % 2:
            layer.refuse("head_dim", f"an even number, as halves are rotated ({hidden} / {heads} without it)")
        kv_heads = layer.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            layer.refuse("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        draft_vocab = top.integer("draft_vocab_size") if "draft_vocab_size" in top else None
        num_read = top.integer("num_aux_hidden_states") if "num_aux_hidden_states" in top else None
        eagle = top.section("eagle_config")
        for each in (top, eagle):
            each.only(use_aux_hidden_state=True, **OF_MODELOPT)
        flags = {name: _flag(name, top, eagle) for name in FLAGS}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            top.refuse("fc_norm", "false beside norm_before_fc")
        found = cls(
            where=top.where,
            entries={name: v for name, v in {**layer.entries, **top.entries}.items() if name not in OF_SPECULATORS},
            hidden_size=hidden,
            intermediate_size=layer.integer("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=layer.integer("vocab_size"),
            target_hidden_size=top.integer("target_hidden_size", hidden),
            draft_vocab_size=draft_vocab,
            rms_norm_eps=layer.number("rms_norm_eps", 1e-6),
            rotary=Rotary.of(layer),
            tie_word_embeddings=top.flag("tie_word_embeddings", False),
            by_output=eagle.integers(LAYER_IDS, least=0),
            by_input=top.integers(LAYER_IDS, least=0),
            num_layers_read=num_read,
            num_hidden_layers=layer.integer("num_hidden_layers", 1, most=MAX_LAYERS if is_nested else 1),
            has_head_norms=has_head_norms,
            attention_bias=layer.flag("attention_bias", False) if is_nested else False,
            mask_token_id=top.integer("mask_token_id", least=0) if is_parallel else None,
            **flags,
        )
        if found.mask_token_id is not None and found.mask_token_id >= found.vocab_size:
            top.refuse("mask_token_id", f"one of the {found.vocab_size} tokens")
        layer.only(hidden_act="silu", attention_bias=found.attention_bias, mlp_bias=False, bias=False)
        layer.only(qkv_bias=False, use_sliding_window=False, is_causal=True, logit_scale=1.0)
        layer.words("layer_types", ["full_attention"])
        eagle.refuse_others()
        layer.refuse_others({*HARMLESS, *UNUSED, *(() if layer is top else ("tie_word_embeddings",))})
        top.refuse_others({*HARMLESS, *UNUSED})
        return found

    def to_entries(self) -> dict[str, Any]:
        """For a config.json that SGLang, vLLM and `read` understand; without what the weights beside it decide.

        What SGLang has no words for (layers of Qwen 3, more than one layer, biases, P-EAGLE) is in speculators' form.
        """
        layer = {
            "model_type": "qwen3" if self.has_head_norms else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "rms_norm_eps": self.rms_norm_eps,
        }
        rest = {
            "target_hidden_size": self.target_hidden_size,
            "tie_word_embeddings": False,
            **{name: getattr(self, name) for name in FLAGS},
        }
        if self.needs_nesting:
            kind = "eagle3" if self.mask_token_id is None else "peagle"
            architecture = "Eagle3DraftModel" if self.mask_token_id is None else "PEagleDraftModel"
            nested = {**{name: self.entries[name] for name in ROTARY if name in self.entries}, **layer}
            more = {} if self.mask_token_id is None else {"mask_token_id": self.mask_token_id}
            return {
                "architectures": [architecture],
                "speculators_model_type": kind,
                "transformer_layer_config": nested,
                **rest,
                **more,
            }
        return {**self.entries, "architectures": [ARCHITECTURE], **layer, **rest}

    @property
    def needs_nesting(self) -> bool:
        """Whether only speculators' form of a config can say what this head is."""
        return (
            self.num_hidden_layers > 1 or self.has_head_norms or self.attention_bias or self.mask_token_id is not None
        )

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the target's layers, of which it has `num_layers`, whose outputs the head reads."""
        layers = self.by_output  # SGLang's
        if not layers:  # vLLM's, and where both look without an entry
            layers = tuple(layer - 1 for layer in self.by_input or (2, num_layers // 2, num_layers - 3))
        if not all(0 <= layer < num_layers for layer in layers):
            raise ValueError(
                f"{self.where}: {LAYER_IDS}: expected outputs of the target's layers 0..{num_layers - 1}, or inputs of"
                f" 1..{num_layers} at the top of the file, got the outputs of {reprlib.repr(layers)}"
            )
        if self.num_layers_read not in (None, len(layers)):
            raise ValueError(f"{self.where}: num_aux_hidden_states: expected {len(layers)}, got {self.num_layers_read}")
        return layers

    def shapes(self, num_layers_read: int) -> dict[str, str]:
        """Returns the tensors of a checkpoint, for each its sizes by the names of `sizes`."""
        of_layer = partial(layer_shapes, bias=self.attention_bias, has_norms=self.has_head_norms)
        layer = {"hidden_norm.weight": "hidden_size", **of_layer("2 * hidden_size")}
        shapes = {
            "fc.weight": f"hidden_size, {FEATURES}",
            **{f"midlayer.{name}": shape for name, shape in layer.items()},
            **{
                f"layers.{i}.{name}": shape
                for i in range(1, self.num_hidden_layers)
                for name, shape in of_layer().items()
            },
            "norm.weight": "hidden_size",
            "embed_tokens.weight": "vocab_size, hidden_size",
            "lm_head.weight": "draft_vocab_size, hidden_size",
            "d2t": "draft_vocab_size",
        }
        if self.norm_before_fc:
            shapes["input_norm.weight"] = FEATURES
        if self.mask_token_id is not None:
            shapes["mask_hidden"] = f"1, 1, {FEATURES}"
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": "target_hidden_size" for i in range(num_layers_read)}
        return shapes

    def sizes(self, num_layers_read: int, draft_vocab_size: int) -> dict[str, int]:
        return {
            **sizes_by_name(self),
            "1": 1,
            "2 * hidden_size": 2 * self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            FEATURES: num_layers_read * self.target_hidden_size,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": draft_vocab_size,
        }


def _flag(name: str, top: ConfigEntries, inner: ConfigEntries) -> bool:
    """Returns an entry at the top of the file or in eagle_config, where NVIDIA's heads have it; False if there is
    none."""
    value = top.flag(name, False)
    found = inner.flag(name, value)
    if name in top and found != value:
        inner.refuse(name, f"the value at the top, {json.dumps(value)}")
    return found
