"""The config.json of a block drafter, in the format of DFlash or speculators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pagedtree.generation.drafters.checkpoint_config import CAUSAL, HARMLESS, ConfigEntries
from pagedtree.generation.drafters.formats import check_heads, entry, head_dim_of, read_rows
from pagedtree.generation.drafters.layers import LayerSizes
from pagedtree.generation.drafters.rotary_config import Rotary

# Architectures of DFlash and speculators, by kind.
ARCHITECTURES = {"dflash": ("DFlashDraftModel", "DFlashSpeculator"), "dflash2": ("DFlash2DraftModel",)}
# Entries of DFlash 2's convolutions and selector.
OF_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OWN = ("draft_vocab_size", "sample_from_anchor", "window_from_anchor")
# Above every real draft model; bounds for config values that no weight's shape confirms.
MAX_LAYERS, MAX_BLOCK, MAX_CANDIDATES = 1024, 1024, 1024
# Defaults that speculators omits from the file, and its kinds of decoder layers.
DFLASH2_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
LAYER_KINDS = ("qwen3", "llama")
FULL, SLIDING = "full_attention", "sliding_attention"

# Entries with only one supported value.
ONLY: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False, "attention_sink_bias": False}
# A factor of the columns of `fc`.
NUM_LAYERS_READ = "layers of target_layer_ids"


@dataclass(frozen=True)
class BlockDraftConfig(LayerSizes):
    """Sizes of a block drafter; names are DFlash's.

    Attributes:
        hidden_size, vocab_size: the target's. draft_vocab_size: size of the draft vocabulary, if smaller.
        block_size: tokens of a block, its known first one included.
        mask_token_id: the target's token that stands for unknown ones.
        target_layer_ids: decoder layers of the target, from 0, whose outputs make the context.
        layer_types: per layer "full_attention", where the tokens of a block see each other (default), or
            "sliding_attention", causal with a window of `sliding_window`.
        is_causal: None, or whether all layers are causal or none is. A non-causal sliding layer has a two-sided window.
        input_embedding_scale, output_multiplier, final_logit_softcapping: the target's, for embeddings and logits.
        window_from_anchor: whether all windows of a block end `sliding_window` before the known token (speculators),
            instead of before each token.
        sample_from_anchor: whether each token of a block predicts the next one; else each mask token its own place.
        conv_kernel_size, conv_group_size, selector_rank, selector_top_k: of DFlash 2, see `block_model`; else None.
        rotary: kind and base of the rotary embedding; None: the default one of `rope_theta`.
    """

    hidden_size: int = entry("integer")
    intermediate_size: int = entry("integer")
    num_hidden_layers: int = entry("integer", most=MAX_LAYERS)
    num_attention_heads: int = entry("integer")
    num_key_value_heads: int = entry("integer")
    head_dim: int = entry("integer", head_dim_of)
    block_size: int = entry("integer", least=2, most=MAX_BLOCK)
    mask_token_id: int = entry("integer", least=0)
    target_layer_ids: tuple[int, ...] = entry("integers", least=0)
    rms_norm_eps: float = entry("number", 1e-6)
    rope_theta: float = 10000.0
    attention_bias: bool = entry("flag", False)
    layer_types: tuple[str, ...] = entry("words", (), known=(FULL, SLIDING))
    sliding_window: int | None = entry("integer", None)
    is_causal: bool | None = None
    input_embedding_scale: float = entry("number", 1.0)
    output_multiplier: float = entry("number", 1.0)
    final_logit_softcapping: float | None = entry("number", None)
    vocab_size: int | None = entry("integer", None)
    draft_vocab_size: int | None = entry("integer", None)
    window_from_anchor: bool = entry("flag", False)
    sample_from_anchor: bool = entry("flag", False)
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    rotary: Rotary | None = None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> BlockDraftConfig:
        """Reads a config.json's contents. Raises ValueError for unknown or unsupported entries."""
        return cls._read(ConfigEntries(config))

    @classmethod
    def _read(cls, top: ConfigEntries) -> BlockDraftConfig:
        kind, entries = (_of_speculators if "speculators_model_type" in top else _of_dflash)(top)
        values, rotary = read_rows(cls, entries), Rotary.of(entries)
        check_heads(entries, values)
        layers, vocab_size, draft_vocab = (values[x] for x in ("num_hidden_layers", "vocab_size", "draft_vocab_size"))
        if kind == "dflash2":
            values |= {name: entries.integer(name) for name in ("vocab_size", *OF_DFLASH2)}
        if not values["target_layer_ids"]:
            values["target_layer_ids"] = _usual_layers(entries, layers)
        if draft_vocab == vocab_size:
            values["draft_vocab_size"] = None
        config = cls(
            rope_theta=rotary.theta,
            is_causal=entries.value("is_causal"),
            rotary=None if rotary.kind == "default" else rotary,
            **values,
        )
        if not config.target_layer_ids:
            entries.refuse("target_layer_ids", "layers of the target")
        if len(config.layer_types) not in (0, layers):
            entries.refuse("layer_types", f"the kinds of num_hidden_layers {layers} layers")
        if not config.layer_types:
            entries.only(use_sliding_window=False)
        if draft_vocab is not None and (vocab_size is None or draft_vocab > vocab_size):
            entries.refuse("draft_vocab_size", f"at most vocab_size {vocab_size}")
        if kind == "dflash2":
            config._check_dflash2(entries)
        entries.only(**ONLY, target_hidden_size=config.hidden_size)
        entries.refuse_others({*HARMLESS, *CAUSAL, "dflash_config", "tie_word_embeddings", "use_sliding_window"})
        return config

    def to_dict(self) -> dict[str, Any]:
        """Returns a config.json's contents for `from_dict`, with DFlash's keys; untested with other engines."""
        values = {name: v for name, v in asdict(self).items() if v is not None and v != () and name != "rotary"}
        for name in OWN:  # keys that DFlash does not know
            if not values.get(name):
                values.pop(name, None)
        if self.rotary is not None:
            values["rope_scaling"] = {"rope_type": self.rotary.kind, **self.rotary.values}
        inner = {name: values.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        inner = {name: list(value) if isinstance(value, tuple) else value for name, value in inner.items()}
        if self.is_causal is not None:  # vLLM's name of it
            inner["causal"] = self.is_causal
        architecture = ARCHITECTURES["dflash" if self.selector_rank is None else "dflash2"][0]
        return {"architectures": [architecture], "model_type": "qwen3", **values, "dflash_config": inner}

    @property
    def most_levels(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def window(self, layer: int) -> int | None:
        """Returns a causal layer's window (0 = none); None for a non-causal layer."""
        if not self._is_causal(layer):
            return None
        return (self.sliding_window or 0) if self._is_sliding(layer) else 0

    def two_sided_window(self, layer: int) -> int:
        """Returns the window of a non-causal sliding layer; 0 for other layers."""
        return 0 if self._is_causal(layer) or not self._is_sliding(layer) else self.sliding_window or 0

    def _is_sliding(self, layer: int) -> bool:
        return self.layer_types[layer : layer + 1] == (SLIDING,)

    def _is_causal(self, layer: int) -> bool:
        return self._is_sliding(layer) if self.is_causal is None else self.is_causal

    def _check_dflash2(self, found: ConfigEntries) -> None:
        assert self.conv_group_size and self.conv_kernel_size and self.selector_top_k and self.vocab_size
        if self.hidden_size % self.conv_group_size:
            found.refuse("conv_group_size", f"a divisor of hidden_size {self.hidden_size}")
        if self.conv_kernel_size > self.block_size:
            found.refuse("conv_kernel_size", f"at most block_size {self.block_size}")
        if self.selector_top_k > min(self.vocab_size, MAX_CANDIDATES):
            found.refuse("selector_top_k", f"at most vocab_size {self.vocab_size} and {MAX_CANDIDATES}")
        if self.draft_vocab_size is not None:
            found.refuse("draft_vocab_size", f"vocab_size {self.vocab_size}, as the selector's codebooks have")


def _usual_layers(found: ConfigEntries, num_layers: int) -> tuple[int, ...]:
    if "num_target_layers" not in found:
        return ()
    count = found.integer("num_target_layers", least=5, most=MAX_LAYERS)
    if num_layers == 1:
        return (count // 2,)
    return tuple(round(1 + i * (count - 4) / (num_layers - 1)) for i in range(num_layers))


def _of_dflash(top: ConfigEntries) -> tuple[str, ConfigEntries]:
    names = top.words("architectures", [name for names in ARCHITECTURES.values() for name in names])
    kind = "dflash2" if set(names) & set(ARCHITECTURES["dflash2"]) else "dflash"
    # Some keys are in an inner dictionary, which DFlash prefers.
    inner = top.section("dflash_config")
    entries = {**top.entries, **inner.entries, "is_causal": top.is_causal(inner)}
    return kind, ConfigEntries(entries, top.where)


def _of_speculators(top: ConfigEntries) -> tuple[str, ConfigEntries]:
    """Returns the kind of a speculators model, and its entries under DFlash's names."""
    kind = top.word("speculators_model_type", tuple(ARCHITECTURES), "dflash")
    top.words("architectures", ARCHITECTURES[kind])
    layer = top.section("transformer_layer_config")
    layer.word("model_type", LAYER_KINDS, "qwen3")
    settings = {name: value for name, value in top.entries.items() if name != "transformer_layer_config"}
    by_input = top.integers("aux_hidden_state_layer_ids", least=1)
    if not by_input:
        top.refuse("aux_hidden_state_layer_ids", "the inputs of layers of the target, from 1")
    is_causal = top.is_causal(layer)
    two_sided = top.flag("sliding_window_non_causal", kind == "dflash2" and not is_causal)
    if two_sided and is_causal:
        top.refuse("sliding_window_non_causal", "false in a causal head")
    renamed: Mapping[str, Any] = {
        "target_layer_ids": [layer - 1 for layer in by_input],
        "block_size": settings.get("block_size", 8),
        "window_from_anchor": True,
        "is_causal": False if two_sided else is_causal,
        "tie_word_embeddings": False,  # of the verifier
        **(DFLASH2_DEFAULTS if kind == "dflash2" else {}),
    }
    for name in ("aux_hidden_state_layer_ids", "sliding_window_non_causal", "speculators_model_type", *CAUSAL):
        settings.pop(name, None)
    entries = {**layer.entries, **renamed, **{name: v for name, v in settings.items() if v is not None}}
    return kind, ConfigEntries({**entries, "window_from_anchor": True}, top.where)
