"""The draft model of DFlash (Chen et al., 2026, arXiv 2602.06036).

One pass over a block of mask tokens guesses all of its positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pagedtree.generation.drafters.checkpoint import WEIGHTS_NAME, StoredTensors, save_checkpoint
from pagedtree.generation.drafters.checkpoint_config import HARMLESS, ConfigEntries
from pagedtree.generation.drafters.layers import (
    Attention,
    GatedMLP,
    RotaryAngles,
    Rotation,
    layer_shapes,
    sizes_by_name,
)
from pagedtree.generation.drafters.rotary_config import Rotary
from pagedtree.generation.drafters.target import Target

__all__ = ["BlockDraftConfig", "BlockDraftModel"]

ARCHITECTURE = "DFlashDraftModel"
# More than any draft model has; they bound what a config can ask for that no weight tells.
MAX_LAYERS, MAX_BLOCK = 1024, 1024
FULL, SLIDING = "full_attention", "sliding_attention"
# What a checkpoint may hold of the target; it is not read, as the target's own is used.
OF_TARGET = ("embed_tokens.weight", "lm_head.weight")

# Columns of `fc`.
FEATURES = "layers of target_layer_ids * hidden_size"

# Layer, q [..., Hq, D], k and v [..., Hkv, D] of the block's tokens -> [..., Hq, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BlockDraftConfig:
    """Sizes of a block drafter, by the names that DFlash's config.json has for them.

    Attributes:
        hidden_size: the target's too, as its embeddings and its output layer are used.
        block_size: tokens of a block, the known one in front included.
        mask_token_id: a token of the target that stands for those to be guessed.
        target_layer_ids: decoder layers of the target, from 0, whose outputs make the context.
        layer_types: "full_attention" or "sliding_attention" for each layer, default all full. In a full layer the
            tokens of a block see each other; a sliding one is causal, with a window of `sliding_window`.
        is_causal: None, or whether all layers are causal or none is.
        input_embedding_scale, output_multiplier, final_logit_softcapping: what the target does to its embeddings and
            its logits.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> BlockDraftConfig:
        """Reads the contents of a config.json. Raises ValueError for what `BlockDraftModel` cannot compute, and for
        entries of which that is not known.
        """
        return cls._read(ConfigEntries(config))

    @classmethod
    def _read(cls, top: ConfigEntries) -> BlockDraftConfig:
        """As `from_dict`; messages then name the file."""
        top.words("architectures", [ARCHITECTURE])
        # Some keys stand in an inner dictionary, where DFlash looks first.
        inner = top.section("dflash_config")
        found = ConfigEntries({**top.entries, **inner.entries}, top.where)
        hidden, heads = found.integer("hidden_size"), found.integer("num_attention_heads")
        kv_heads, layers = found.integer("num_key_value_heads"), found.integer("num_hidden_layers", most=MAX_LAYERS)
        head_dim = found.integer("head_dim", hidden // heads if hidden % heads == 0 else None)
        if heads % kv_heads:
            found.refuse("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        if head_dim % 2:
            found.refuse("head_dim", "an even number, as halves are rotated")
        causal = "causal" if "causal" in found else "is_causal"
        made = cls(
            hidden_size=hidden,
            intermediate_size=found.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            block_size=found.integer("block_size", least=2, most=MAX_BLOCK),
            mask_token_id=found.integer("mask_token_id", least=0),
            target_layer_ids=found.integers("target_layer_ids", least=0),
            rms_norm_eps=found.number("rms_norm_eps", 1e-6),
            rope_theta=Rotary.of(found, ["default"]).theta,
            attention_bias=found.flag("attention_bias", False),
            layer_types=found.words("layer_types", (FULL, SLIDING)),
            sliding_window=found.integer("sliding_window") if "sliding_window" in found else None,
            is_causal=found.flag(causal, False) if causal in found else None,
            input_embedding_scale=found.number("input_embedding_scale", 1.0),
            output_multiplier=found.number("output_multiplier", 1.0),
            final_logit_softcapping=(
                found.number("final_logit_softcapping") if "final_logit_softcapping" in found else None
            ),
        )
        if not made.target_layer_ids:
            found.refuse("target_layer_ids", "layers of the target")
        if len(made.layer_types) not in (0, layers):
            found.refuse("layer_types", f"the kinds of num_hidden_layers {layers} layers")
        if not made.layer_types:
            found.only(use_sliding_window=False)
        if made.is_causal is False and SLIDING in made.layer_types:
            found.refuse(causal, "true or null with layers of sliding attention")
        found.only(hidden_act="silu", mlp_bias=False, attention_sink_bias=False)
        found.only(draft_vocab_size=found.value("vocab_size"), target_hidden_size=hidden)
        found.refuse_others({*HARMLESS, "dflash_config", "is_causal", "tie_word_embeddings", "use_sliding_window"})
        return made

    def to_dict(self) -> dict[str, Any]:
        """The contents of a config.json that `from_dict` reads, in the keys of DFlash; no other engine has read one."""
        values = {name: value for name, value in asdict(self).items() if value is not None and value != ()}
        inner = {name: values.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        inner = {name: list(value) if isinstance(value, tuple) else value for name, value in inner.items()}
        if self.is_causal is not None:  # vLLM's name of it
            inner["causal"] = self.is_causal
        return {"architectures": [ARCHITECTURE], "model_type": "qwen3", **values, "dflash_config": inner}

    def window(self, layer: int) -> int | None:
        """None where the block's tokens see all others; else the layer is causal, with this window (0 = none)."""
        is_sliding = self.layer_types[layer : layer + 1] == (SLIDING,)
        is_causal = is_sliding if self.is_causal is None else self.is_causal
        if not is_causal:
            if is_sliding:
                raise ValueError("block drafter: expected sliding attention to be causal, got is_causal False")
            return None
        return (self.sliding_window or 0) if is_sliding else 0


class _Layer(nn.Module):
    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, bias=config.attention_bias, norm_eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, states: Tensor, rotation: Rotation, attend: Callable[..., Tensor]) -> Tensor:
        attention, inputs = self.self_attn, self.input_layernorm(states)
        out = attend(attention.queries(inputs, rotation), *attention.keys_values(inputs, rotation))
        states = states + attention.output(out)
        return cast(Tensor, states + self.mlp(self.post_attention_layernorm(states)))


class BlockDraftModel(nn.Module):
    """Transformer layers that guess a block of tokens in one pass, from what a target model made of the text so far.

    The block is the newest known token and block_size - 1 mask tokens in the places of those that follow it. The
    context is in keys and values alone: the outputs of some of the target's layers at a token are joined and projected
    to one state (`fc`, `hidden_norm`), from which every layer makes the token's key and value. Embeddings and output
    layer are the target's.

    The layers' forms, the names of their weights and the keys of the config are those of DFlash's published
    `DFlashDraftModel` checkpoints (github.com/z-lab/dflash), which `from_pretrained` is written to read: z-lab's for
    Qwen3-4B, Qwen3-8B, Qwen3-Coder-30B-A3B and LLaMA3.1-8B-Instruct, and others of this architecture. It was tested
    with files of that layout made here, not with the published weights. Refused: `DFlash2DraftModel`, RoPE other than
    the default, attention sinks, and sliding windows that are not causal. The library speculators has another format.

    Args:
        config: sizes.
        embed: the target's input embeddings, a module with `weight` [V, hidden_size]. ValueError for another width.
        lm_head: the target's output layer, hidden states [..., hidden_size] -> logits [..., V].
    """

    def __init__(self, config: BlockDraftConfig, embed: nn.Module, lm_head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config = config
        tokens = cast(Tensor, embed.weight)
        if tokens.shape[1] != config.hidden_size or config.mask_token_id >= tokens.shape[0]:
            raise ValueError(
                f"embed: expected a weight of [more than mask_token_id {config.mask_token_id}, hidden_size"
                f" {config.hidden_size}], got {[*tokens.shape]}"
            )
        num_features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._angles = RotaryAngles(Rotary("default", config.rope_theta, {}).frequencies(config.head_dim))
        # In a tuple, so that the target's layers do not become submodules: their weights are not this model's to save.
        self._of_target = (embed, lm_head)

    @property
    def embeddings(self) -> Tensor:
        """[V, hidden_size], the target's."""
        return cast(Tensor, self._of_target[0].weight)

    def check_target(self, hidden_size: int, vocab_size: int) -> None:
        """Raises ValueError where the model does not fit a target whose layers have `hidden_size` outputs and which
        reads the tokens 0..vocab_size - 1.
        """
        expected, (num_tokens, width) = self.fc.in_features, self.embeddings.shape
        given = hidden_size * len(self.config.target_layer_ids)
        if given != expected:
            raise ValueError(f"drafter: expected a target with {expected} features of a token, got {given}")
        if num_tokens < vocab_size or width != self.config.hidden_size:
            raise ValueError(
                f"drafter: expected embeddings of the target's {vocab_size} tokens and of hidden_size"
                f" {self.config.hidden_size}, got {[num_tokens, width]}"
            )

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of known tokens for each layer: features [..., len(target_layer_ids) * hidden_size] and
        positions int64 [...] -> (k, v), each [..., Hkv, D].
        """
        weight = self.fc.weight
        states = self.hidden_norm(self.fc(features.to(weight.dtype)))
        rotation = self._angles.at(positions, weight.dtype)
        return [cast(_Layer, layer).self_attn.keys_values(states, rotation) for layer in self.layers]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Tokens of blocks and their positions, int64 [...] -> the states [..., hidden_size] that `logits` takes.

        attend: attention of a layer's queries over the context and over the given keys and values of the blocks.
        """
        states = F.embedding(tokens, self.embeddings)
        if self.config.input_embedding_scale != 1.0:
            states = states * self.config.input_embedding_scale
        rotation = self._angles.at(positions, states.dtype)
        for i, layer in enumerate(self.layers):
            states = layer(states, rotation, lambda q, k, v, i=i: attend(i, q, k, v))
        return cast(Tensor, self.norm(states))

    def logits(self, states: Tensor) -> Tensor:
        """States [..., hidden_size] of a block -> logits [..., V] of the tokens in these very places."""
        logits = self._of_target[1](states)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if cap else logits

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes config.json and model.safetensors into the folder `path`."""
        config = {**self.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
        save_checkpoint(path, config, self.state_dict(), dtype)

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any) -> BlockDraftModel:
        """A block drafter for `model` (its embeddings, output layer, device and dtype) from the folder `path`.

        Config and shapes are checked before any weight is read. ValueError names the file and the entry or tensor of a
        checkpoint that is not as the class says, or not for this model, or of entries and tensors that are not known;
        OSError for files that cannot be read.
        """
        path, target = Path(path), Target.of(model)
        device, dtype = target.place
        entries = ConfigEntries.load(path)
        config = BlockDraftConfig._read(entries)
        num_tokens, width = target.embed_tokens.weight.shape  # type: ignore[misc]
        if config.hidden_size != width:
            entries.refuse("hidden_size", f"the target's {width}")
        if config.mask_token_id >= num_tokens:
            entries.refuse("mask_token_id", f"one of the target's {num_tokens} tokens", config.mask_token_id)
        if max(config.target_layer_ids) >= target.num_layers:
            layers = f"layers of the target's 0..{target.num_layers - 1}"
            entries.refuse("target_layer_ids", layers, config.target_layer_ids)
        if "vocab_size" in entries:
            target.check(entries, "vocab_size", entries.integer("vocab_size"))
        stored = StoredTensors(path, (WEIGHTS_NAME, "*.safetensors"))
        shapes = _shapes(config)
        stored.expect(shapes, _sizes(config), ignored=OF_TARGET)
        drafter = cls(config, target.embed_tokens, target.lm_head)
        drafter.load_state_dict({name: stored.load(name) for name in shapes})
        return drafter.to(device, dtype).eval()


def _shapes(config: BlockDraftConfig) -> dict[str, str]:
    """The tensors of a checkpoint, for each its sizes by the names of `_sizes`."""
    layer = layer_shapes(bias=config.attention_bias, has_norms=True)
    return {
        "fc.weight": f"hidden_size, {FEATURES}",
        "hidden_norm.weight": "hidden_size",
        "norm.weight": "hidden_size",
        **{f"layers.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in layer.items()},
    }


def _sizes(config: BlockDraftConfig) -> dict[str, int]:
    return {**sizes_by_name(config), FEATURES: len(config.target_layer_ids) * config.hidden_size}
