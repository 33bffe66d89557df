"""Layers of draft heads; modules are named like the tensors in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, KV_HEADS = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"

# Cosines and sines of the angles by which halves of heads are rotated, each [..., 1, head_dim / 2].
Rotation = tuple[Tensor, Tensor]
# Queries [..., Hq, D], keys and values [..., Hkv, D] -> [..., Hq, D].
Attend = Callable[..., Tensor]


class LayerSizes:
    """Base of configs: the sizes of a decoder layer, named as in config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool


class RotaryAngles:
    """Angles of rotary embeddings, by `Rotary.frequencies`. Not a module, so that these stay in fp32 in any head."""

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None, None].float() * self._frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Attention(nn.Module):
    """The projections of an attention layer. Keys and values may come from other states than the queries.

    inputs: width of the input states; None = hidden_size. bias: whether they have biases. norm_eps: epsilon of an
    RMSNorm of each query and key, as in Qwen 3; None = no norm.
    """

    def __init__(
        self, sizes: LayerSizes, inputs: int | None = None, *, bias: bool = False, norm_eps: float | None = None
    ) -> None:
        super().__init__()
        inputs, self.head_dim = inputs or sizes.hidden_size, sizes.head_dim
        query, key = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
        self.q_proj = nn.Linear(inputs, query, bias=bias)
        self.k_proj = nn.Linear(inputs, key, bias=bias)
        self.v_proj = nn.Linear(inputs, key, bias=bias)
        self.o_proj = nn.Linear(query, sizes.hidden_size, bias=bias)
        self.q_norm = nn.Identity() if norm_eps is None else nn.RMSNorm(sizes.head_dim, eps=norm_eps)
        self.k_norm = nn.Identity() if norm_eps is None else nn.RMSNorm(sizes.head_dim, eps=norm_eps)

    def queries(self, states: Tensor, rotation: Rotation) -> Tensor:
        return self._rotated(self.q_proj(states), self.q_norm, rotation)

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return self._rotated(self.k_proj(states), self.k_norm, rotation), self._heads(self.v_proj(states))

    def forward(self, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        heads = attend(self.queries(states, rotation), *self.keys_values(states, rotation))
        return cast(Tensor, self.o_proj(heads.flatten(-2)))

    def _rotated(self, projected: Tensor, norm: nn.Module, rotation: Rotation) -> Tensor:
        # Under torch.autocast norms and rotation return float32, but the values' projections do not.
        return _rotated(norm(self._heads(projected)), rotation).to(projected.dtype)

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), as in Llama."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states)))


class DecoderLayer(nn.Module):
    """A Llama-style layer: pre-norm attention and gated MLP, with residuals. has_head_norms: whether queries and keys
    have an RMSNorm, as in Qwen 3. inputs: see `Attention`."""

    def __init__(self, sizes: LayerSizes, inputs: int | None = None, *, has_head_norms: bool) -> None:
        super().__init__()
        hidden, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(sizes, inputs, bias=sizes.attention_bias, norm_eps=eps if has_head_norms else None)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = GatedMLP(sizes)

    def forward(self, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        return self.add_mlp(states + self.self_attn(self.input_layernorm(states), rotation, attend))

    def add_mlp(self, states: Tensor) -> Tensor:
        return cast(Tensor, states + self.mlp(self.post_attention_layernorm(states)))


def layer_shapes(inputs: str = "hidden_size", *, bias: bool = False, has_norms: bool = False) -> dict[str, str]:
    """Returns the shape of each tensor of a layer, norms included, as products (`formats.size_of`). inputs, bias: see
    `Attention`. has_norms: whether queries and keys have norms."""
    shapes = {
        "input_layernorm.weight": "hidden_size",
        "self_attn.q_proj.weight": f"{HEADS}, {inputs}",
        "self_attn.k_proj.weight": f"{KV_HEADS}, {inputs}",
        "self_attn.v_proj.weight": f"{KV_HEADS}, {inputs}",
        "self_attn.o_proj.weight": f"hidden_size, {HEADS}",
    }
    if has_norms:
        shapes |= {"self_attn.q_norm.weight": "head_dim", "self_attn.k_norm.weight": "head_dim"}
    shapes |= {
        "post_attention_layernorm.weight": "hidden_size",
        "mlp.gate_proj.weight": "intermediate_size, hidden_size",
        "mlp.up_proj.weight": "intermediate_size, hidden_size",
        "mlp.down_proj.weight": "hidden_size, intermediate_size",
    }
    if bias:
        rows = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "o": "hidden_size"}
        shapes |= {f"self_attn.{name}_proj.bias": size for name, size in rows.items()}
    return shapes


def _rotated(states: Tensor, rotation: Rotation) -> Tensor:
    """Applies rotary embeddings to [..., H, D]; a pair is element i of each half."""
    (first, second), (cos, sin) = states.chunk(2, dim=-1), rotation
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
