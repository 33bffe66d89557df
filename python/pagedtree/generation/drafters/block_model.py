"""The draft model of DFlash (Chen et al., 2026, arXiv 2602.06036).

One pass over a block of mask tokens guesses all of its positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BlockDraftConfig", "BlockDraftModel"]

ARCHITECTURE = "DFlashDraftModel"
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
FULL, SLIDING = "full_attention", "sliding_attention"
# What a checkpoint may hold of the target; it is not read, as the target's own is used.
OF_TARGET = ("embed_tokens.weight", "lm_head.weight")

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
        """From the contents of a config.json. Raises ValueError for what `BlockDraftModel` cannot compute."""
        architectures = config.get("architectures") or [ARCHITECTURE]
        if architectures != [ARCHITECTURE]:
            raise ValueError(f"block drafter: expected architecture {ARCHITECTURE}, got {', '.join(architectures)}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise ValueError(f'block drafter: expected rope type "default", got {kind!r}')
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f'block drafter: expected hidden_act "silu", got {config["hidden_act"]!r}')
        # Some keys stand in an inner dictionary, where DFlash looks first.
        inner = config.get("dflash_config") or {}
        found = {**config, **rope, **({"is_causal": inner["causal"]} if "causal" in inner else {}), **inner}
        if found.get("attention_sink_bias"):
            raise ValueError("block drafter: expected attention without sinks, got attention_sink_bias")
        if found.get("head_dim") is None and "hidden_size" in found and "num_attention_heads" in found:
            found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
        known = {field.name: found[field.name] for field in fields(cls) if found.get(field.name) is not None}
        missing = [name for name in cls.__match_args__ if name not in known and not hasattr(cls, name)]
        if missing:
            raise ValueError(f"block drafter: expected {', '.join(missing)} in its config")
        for name in ("target_layer_ids", "layer_types"):
            known[name] = tuple(known.get(name, ()))
        unknown = set(known["layer_types"]) - {FULL, SLIDING}
        if unknown:
            raise ValueError(f"block drafter: expected layers of full or sliding attention, got {', '.join(unknown)}")
        made = cls(**known)
        for layer in range(made.num_hidden_layers):
            made.window(layer)
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


class _Attention(nn.Module):
    """Attention of Qwen 3, whose keys and values may come from elsewhere."""

    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        hidden, bias, self.head_dim = config.hidden_size, config.attention_bias, config.head_dim
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, query, bias=bias)
        self.k_proj = nn.Linear(hidden, key, bias=bias)
        self.v_proj = nn.Linear(hidden, key, bias=bias)
        self.o_proj = nn.Linear(query, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def queries(self, states: Tensor, rotation: Tensor) -> Tensor:
        return _rotated(self.q_norm(self._heads(self.q_proj(states))), rotation)

    def keys_values(self, states: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.k_norm(self._heads(self.k_proj(states)))
        return _rotated(keys, rotation), self._heads(self.v_proj(states))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim))


class _MLP(nn.Module):
    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states)))


class _Layer(nn.Module):
    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _MLP(config)

    def forward(self, states: Tensor, rotation: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        attention, inputs = self.self_attn, self.input_layernorm(states)
        out = attend(attention.queries(inputs, rotation), *attention.keys_values(inputs, rotation))
        states = states + attention.o_proj(out.flatten(-2))
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
        embed: the target's input embeddings, a module with `weight` [V, hidden_size].
        lm_head: the target's output layer, hidden states [..., hidden_size] -> logits [..., V].
    """

    def __init__(self, config: BlockDraftConfig, embed: nn.Module, lm_head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config = config
        num_features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self.register_buffer("_inv_freq", (config.rope_theta**-exponents).float(), persistent=False)
        # In a tuple, so that the target's layers do not become submodules: their weights are not this model's to save.
        self._of_target = (embed, lm_head)

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of known tokens for each layer: features [..., len(target_layer_ids) * hidden_size] and
        positions int64 [...] -> (k, v), each [..., Hkv, D].
        """
        weight = self.fc.weight
        states = self.hidden_norm(self.fc(features.to(weight.dtype)))
        rotation = self._rotation(positions, weight.dtype)
        return [cast(_Layer, layer).self_attn.keys_values(states, rotation) for layer in self.layers]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Tokens of blocks and their positions, int64 [...] -> the states [..., hidden_size] that `logits` takes.

        attend: attention of a layer's queries over the context and over the given keys and values of the blocks.
        """
        weight = cast(Tensor, self._of_target[0].weight)
        states = F.embedding(tokens, weight)
        if self.config.input_embedding_scale != 1.0:
            states = states * self.config.input_embedding_scale
        rotation = self._rotation(positions, states.dtype)
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
        from safetensors.torch import save_file  # of an extra of the package

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        config = {**self.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
        (path / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, path / WEIGHTS_NAME, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any) -> BlockDraftModel:
        """A block drafter for `model` (its embeddings, output layer, device and dtype) from the folder `path`.

        Raises ValueError for a checkpoint that is not as the class says, or not for this model.
        """
        from safetensors.torch import load_file

        path = Path(path)
        config = BlockDraftConfig.from_dict(json.loads((path / CONFIG_NAME).read_text()))
        embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        num_tokens, hidden_size = embed.weight.shape
        if hidden_size != config.hidden_size or not 0 <= config.mask_token_id < num_tokens:
            raise ValueError(
                f"block drafter: expected a target of hidden size {config.hidden_size} with token"
                f" {config.mask_token_id}, got hidden size {hidden_size} and {num_tokens} tokens"
            )
        drafter = cls(config, embed, lm_head)
        tensors = {name: each for file in sorted(path.glob("*.safetensors")) for name, each in load_file(file).items()}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in OF_TARGET}
        expected = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
        if {name: tensor.shape for name, tensor in tensors.items()} != expected:
            wrong = [n for n in sorted(expected | tensors) if n not in expected or n not in tensors] or [
                name for name in sorted(expected) if tensors[name].shape != expected[name]
            ]
            raise ValueError(f"block drafter: missing, unknown or of another shape: {', '.join(wrong[:5])}")
        drafter.load_state_dict(tensors)
        return drafter.to(embed.weight.device, embed.weight.dtype).eval()

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines and sines for rotary embeddings, [2, ..., 1, head_dim]."""
        angles = positions[..., None, None].float() * cast(Tensor, self._inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def _rotated(states: Tensor, rotation: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]
