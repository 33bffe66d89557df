"""The head of EAGLE-3: one decoder layer on features of the target (Li et al., 2025, arXiv 2503.01840)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["EagleHead"]

CONFIG_NAME = "config.json"
WEIGHTS_NAMES = ("model.safetensors", "pytorch_model.bin")
ARCHITECTURE = "LlamaForCausalLMEagle3"
# The entries of config.json that the head is made of, and what SGLang and vLLM take where they are missing.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
DEFAULTS = {"rms_norm_eps": 1e-6, "norm_before_residual": False, "hidden_act": "silu", "attention_bias": False}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class EagleHead(nn.Module):
    """A decoder layer of Llama's kind that reads a token and a state at each position, with what is around it.

    At position t stand the target's token t + 1 and its features of token t, three layers' outputs that `fuse` makes
    one state of; in a draft, the state is what the layer gave at the node before. What the layer gives, read by
    `logits`, names the token t + 2.

    The draft vocabulary may be a part of the target's: `target_ids` are the target's ids of its tokens.

    Args:
        config: entries of config.json, as SGLang and vLLM name them.
        embed_tokens, lm_head: the target's embedding and output layer. The head has its own in their place if its
            checkpoint does.
        feature_layers: the layers of the target whose outputs are the features (`Drafter.feature_layers`).
        target_ids: int64 [draft vocabulary], ascending; None = the target's whole vocabulary.
    """

    target_ids: Tensor

    def __init__(
        self,
        config: dict[str, Any],
        embed_tokens: nn.Module,
        lm_head: Any,
        feature_layers: tuple[int, ...],
        target_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config = {**DEFAULTS, **config}
        _check(config)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.feature_layers = tuple(feature_layers)
        self.head_dim = config.get("head_dim") or hidden // heads
        self.num_heads, self.num_kv_heads = heads, config.get("num_key_value_heads") or heads
        rows: Tensor = lm_head.weight if target_ids is None else lm_head.weight[target_ids.to(lm_head.weight.device)]
        if target_ids is None:
            target_ids = torch.arange(rows.shape[0])
        self.register_buffer("target_ids", target_ids, persistent=False)
        features = config.get("target_hidden_size") or hidden
        self.fc = nn.Linear(features * len(self.feature_layers), hidden, bias=False)
        self.midlayer = _Layer(config, self.num_heads, self.num_kv_heads, self.head_dim)
        self.norm = _Norm(hidden, config["rms_norm_eps"])
        self.embed_tokens: nn.Embedding | None = None
        # In a tuple, so that the target's layer does not become a submodule: its weights are not the head's to save.
        self._embed_tokens = (embed_tokens,)
        # The target's own rows until the head has others.
        self.lm_head: nn.Linear | None = None
        self._rows = (rows.detach(),)
        self._frequencies = _frequencies(config, self.head_dim)  # no buffer: they stay in fp32 in any dtype

    @property
    def vocab_size(self) -> int:
        """Tokens of the draft vocabulary."""
        return self.target_ids.shape[0]

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [T, F] to states [T, H]."""
        states: Tensor = self.fc(features)
        return states

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Tokens of the target's vocabulary, int64 [..., T], with states [..., T, H] to the next states.

        positions: int64, broadcast to tokens. attend: queries [..., T, Hq, D], keys and values [..., T, Hkv, D] ->
        [..., T, Hq, D].
        """
        embed = self._embed_tokens[0] if self.embed_tokens is None else self.embed_tokens
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None, None].float() * self._frequencies
        rotation = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
        out: Tensor = self.midlayer(embed(tokens), states, rotation, attend)
        return out

    def logits(self, states: Tensor) -> Tensor:
        """What `forward` gave, [..., H], to logits over the draft vocabulary."""
        rows = self._rows[0] if self.lm_head is None else self.lm_head.weight
        return F.linear(self.norm(states), rows)

    def save_pretrained(
        self, path: str | Path, dtype: torch.dtype = torch.bfloat16, *, needs_target: bool = False
    ) -> None:
        """Writes config.json and model.safetensors into the folder `path`, in the format of SGLang and vLLM.

        needs_target: leave out an output layer that the head has from the target. SGLang and vLLM then cannot load it;
            `from_pretrained` can.
        """
        from safetensors.torch import save_file  # of an extra of the package

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        vocab_size = int(self.config["vocab_size"])
        config = {
            **self.config,
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": False,
            "vocab_size": vocab_size,
            "draft_vocab_size": self.vocab_size,
            "target_hidden_size": self.fc.in_features // len(self.feature_layers),
            # SGLang names layers by their outputs, vLLM by their inputs.
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
                "use_aux_hidden_state": True,
            },
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.feature_layers],
        }
        (path / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in self.state_dict().items()}
        if self.lm_head is None and not needs_target:
            tensors["lm_head.weight"] = self._rows[0].to(dtype).contiguous()
        ids = self.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        save_file(tensors, path / WEIGHTS_NAMES[0], metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any) -> EagleHead:
        """The head for `model`, on its device and in its dtype, from a folder as SGLang and vLLM load it.

        Without d2t the draft vocabulary is the target's. Where a tensor embed_tokens.weight or lm_head.weight is
        missing, the target's rows stand in for it. ValueError for a head of another architecture or size, or tensors
        that do not fit.
        """
        path = Path(path)
        config = json.loads((path / CONFIG_NAME).read_text())
        tensors = {_own_name(name): tensor for name, tensor in _read_weights(path).items()}
        embed_tokens, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        tensors.pop("t2d", None)
        offsets = tensors.pop("d2t", None)
        ids = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        target_vocab = lm_head.weight.shape[0]
        if ids is not None and bool(((ids < 0) | (ids >= target_vocab)).any()):
            raise ValueError(f"d2t: expected tokens of the target's {target_vocab}, got {int(ids.min())}..{ids.max()}")
        num_layers = model.config.get_text_config().num_hidden_layers
        head = cls(config, embed_tokens, lm_head, _feature_layers(config, num_layers), ids)
        if config.get("tie_word_embeddings") and "embed_tokens.weight" in tensors:
            tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
        if (own := tensors.get("embed_tokens.weight")) is not None:
            head.embed_tokens = nn.Embedding(*own.shape)
        if (own := tensors.get("lm_head.weight")) is not None:
            if ids is None and own.shape[0] != target_vocab:
                raise ValueError(f"lm_head.weight: expected {target_vocab} rows, or a tensor d2t, got {own.shape[0]}")
            head.lm_head = nn.Linear(own.shape[1], own.shape[0], bias=False)
        for name, target in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            width, wanted = target.weight.shape[1], config["hidden_size"]
            if getattr(head, name) is None and width != wanted:
                raise ValueError(
                    f"{name}.weight: expected it in a head of hidden_size {wanted}, the target has {width}"
                )
        _check_shapes(head, tensors)
        head.load_state_dict(tensors)
        weight = lm_head.weight
        return head.to(weight.device, weight.dtype).eval()


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, states: Tensor) -> Tensor:
        return F.rms_norm(states, self.weight.shape, self.weight, self.eps)


class _Layer(nn.Module):
    """Names of the modules are those of the tensors in a checkpoint."""

    def __init__(self, config: dict[str, Any], num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.hidden_norm, self.input_layernorm = _Norm(hidden, eps), _Norm(hidden, eps)
        self.post_attention_layernorm = _Norm(hidden, eps)
        self.head_dim, self.is_residual_normed = head_dim, config["norm_before_residual"]
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, num_heads * head_dim, bias=False),
                "k_proj": nn.Linear(2 * hidden, num_kv_heads * head_dim, bias=False),
                "v_proj": nn.Linear(2 * hidden, num_kv_heads * head_dim, bias=False),
                "o_proj": nn.Linear(num_heads * head_dim, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, config["intermediate_size"], bias=False),
                "up_proj": nn.Linear(hidden, config["intermediate_size"], bias=False),
                "down_proj": nn.Linear(config["intermediate_size"], hidden, bias=False),
            }
        )

    def forward(self, embeds: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.is_residual_normed else states
        inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        q, k, v = (
            self.self_attn[name](inputs).unflatten(-1, (-1, self.head_dim)) for name in ("q_proj", "k_proj", "v_proj")
        )
        heads = attend(_rotated(q, *rotation), _rotated(k, *rotation), v)
        residual = residual + self.self_attn["o_proj"](heads.flatten(-2))
        inputs = self.post_attention_layernorm(residual)
        gated = F.silu(self.mlp["gate_proj"](inputs)) * self.mlp["up_proj"](inputs)
        out: Tensor = residual + self.mlp["down_proj"](gated)
        return out


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., H, D] whose halves are the pairs' parts; cos and sin are [..., 1, D / 2]."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of the rotary embedding: transformers 5 writes rope_parameters, 4 rope_theta and rope_scaling."""
    given = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    kind = given.get("rope_type") or given.get("type") or "default"
    return {**given, "rope_type": kind, "rope_theta": given.get("rope_theta") or 10000.0}


def _frequencies(config: dict[str, Any], head_dim: int) -> Tensor:
    """fp32 [head_dim / 2]: angles of a step of one position."""
    rotary = _rotary(config)
    steps = rotary["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rotary["rope_type"] == "linear":
        return steps / rotary["factor"]
    if rotary["rope_type"] == "llama3":  # slow ones are slowed down further, as in Llama 3.1's report
        low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
        turns = rotary["original_max_position_embeddings"] * steps / (2 * math.pi)
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return steps * (share + (1 - share) / rotary["factor"])
    return steps


def _check(config: dict[str, Any]) -> None:
    """ValueError for what the head does not compute."""
    missing = [name for name in SIZES if not config.get(name)]
    if missing:
        raise ValueError(f"{CONFIG_NAME}: expected the sizes of a Llama layer, {', '.join(missing)} is missing")
    if config.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"num_hidden_layers: expected 1, got {config['num_hidden_layers']}")
    if config["hidden_act"] != "silu" or config["attention_bias"] or config.get("mlp_bias"):
        raise ValueError(f"{CONFIG_NAME}: expected hidden_act silu and no biases, got {config['hidden_act']} or biases")
    if config.get("eagle_config", {}).get("use_aux_hidden_state") is False:
        raise ValueError("eagle_config: expected use_aux_hidden_state, got a head on the last hidden state alone")
    kind = _rotary(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope_type: expected default, linear or llama3, got {kind}")


def _feature_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers, of which it has `num_layers`, whose outputs the head reads."""
    by_output = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    by_input = config.get("eagle_aux_hidden_state_layer_ids")
    if by_output:  # SGLang's
        return tuple(by_output)
    inputs = by_input or (2, num_layers // 2, num_layers - 3)  # vLLM's, and where both look without an entry
    return tuple(layer - 1 for layer in inputs)


def _own_name(name: str) -> str:
    """SGLang's training writes midlayer, vLLM's layers.0; some have the model in front."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def _read_weights(path: Path) -> dict[str, Tensor]:
    if (path / WEIGHTS_NAMES[0]).exists():
        from safetensors.torch import load_file  # of an extra of the package

        return load_file(path / WEIGHTS_NAMES[0])
    weights: dict[str, Tensor] = torch.load(path / WEIGHTS_NAMES[1], map_location="cpu", weights_only=True)
    return weights


def _check_shapes(head: nn.Module, tensors: dict[str, Tensor]) -> None:
    own = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"checkpoint: expected tensors of its config, but {name} is {given.get(name)} in place of {own.get(name)}"
        )
