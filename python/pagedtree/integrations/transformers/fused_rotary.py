"""Rotary embedding within the attention of packed passes, by `rope_append`.

Most decoders call apply_rotary_pos_emb(q, k, cos, sin), a dozen torch operations, just before the attention interface.
In a packed pass it becomes the identity, and the attention rotates and caches by one op, if the function rotates the
halves of the heads' first columns, and its output reached the attention unchanged in the layer's first pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagedtree.generation.paged_step import Rotation
from pagedtree.integrations.transformers.forwards import with_forwards, with_functions
from pagedtree.integrations.transformers.packed_pass import PackedPass, current_pass

__all__ = ["RotaryLayer", "rotary_layers", "rotated_in_attention", "rotation_of"]

FUNCTION = "apply_rotary_pos_emb"


class RotaryLayer:
    """An attention layer whose rotation may move into the attention. is_fused: whether it moved; None until a first
    pass with host-readable values decides."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_fused: bool | None = None
        self._forward: Any = type(module).forward
        self.own: Callable[..., Any] = self._forward.__globals__[FUNCTION]

    def forward(self) -> Callable[..., Any]:
        """Runs the module's own forward with our function."""
        return MethodType(with_functions(self._forward, **{FUNCTION: self._rotate}), self.module)

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = current_pass.get()
        if packed is None or self.is_fused is False:
            return self.own(q, k, cos, sin, *args, **kwargs)
        if self.is_fused is None:
            if args or kwargs:
                self.is_fused = False
            q, k = self.own(q, k, cos, sin, *args, **kwargs)
        packed.rotated = _Rotated(self, q, k, cos, sin)
        return q, k


class _Rotated(NamedTuple):
    """The output of a layer's function: rotated in the layer's first pass, unrotated in later ones."""

    layer: RotaryLayer
    query: Tensor  # [1, Hq, T, D]
    key: Tensor
    cos: Tensor  # [1, T, columns], the same angles in both halves
    sin: Tensor


def rotation_of(packed: PackedPass, query: Tensor, key: Tensor) -> Rotation | None:
    """Returns the rotation of the attention's inputs; None where the layer has rotated them."""
    rotated, packed.rotated = packed.rotated, None
    if rotated is None:
        return None
    layer = rotated.layer
    is_same = query is rotated.query and key is rotated.key
    if layer.is_fused is None:
        cos = rotated.cos
        if not (cos.is_meta or (cos.is_cuda and torch.cuda.is_current_stream_capturing())):  # the host may read it
            layer.is_fused = is_same and _fits(rotated)
        return None
    if not layer.is_fused:
        return None
    if not is_same:
        name = type(layer.module).__name__
        raise ValueError(f"model: expected {name} to hand what it rotates to the attention, as in its first pass")
    return packed.rotation(rotated.cos, rotated.sin)


def _fits(rotated: _Rotated) -> bool:
    cos, sin, query = rotated.cos, rotated.sin, rotated.query
    shape = (1, query.shape[2], cos.shape[-1])
    if cos.shape != shape or sin.shape != shape or cos.dtype != sin.dtype or cos.shape[-1] % 2:
        return False
    if cos.dtype not in (torch.float32, query.dtype) or query.dtype != rotated.key.dtype:
        return False
    if not all(torch.equal(*angle.chunk(2, dim=-1)) for angle in (cos, sin)):
        return False
    return _rotates_halves(rotated.layer.own, query.shape[-1], cos.shape[-1])


@lru_cache
def _rotates_halves(function: Callable[..., Any], head_dim: int, columns: int) -> bool:
    """Tries on fp32 numbers whether the function rotates the halves of the heads' first columns."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, device="cpu", dtype=torch.float32)
    q, k = (normal(1, heads, 3, head_dim) for heads in (4, 2))
    half = normal(2, 1, 3, columns // 2)
    try:
        found_q, found_k = function(q, k, *torch.cat([half, half], dim=-1))
    except (IndexError, RuntimeError, TypeError, ValueError):  # it rotates something else
        return False
    cos, sin = half[:, :, None]
    for x, y in ((q, found_q), (k, found_k)):
        first, second, rest = x.split([columns // 2, columns // 2, head_dim - columns], dim=-1)
        expected = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
        if y.dtype != x.dtype or not torch.equal(y, expected):
            return False
    return True


def rotary_layers(model: nn.Module) -> list[RotaryLayer]:
    """Returns the model's layers whose rotation may move into the attention."""
    return [RotaryLayer(module) for module in model.modules() if hasattr(module, "layer_idx") and _has_function(module)]


def _has_function(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or inspect.unwrap(forward) is not forward or "forward" in vars(module):
        return False
    function = forward.__globals__.get(FUNCTION)
    if FUNCTION not in forward.__code__.co_names or not callable(function):
        return False
    return (*inspect.signature(function).parameters,)[:4] == ("q", "k", "cos", "sin")


def rotated_in_attention(layers: Iterable[RotaryLayer]) -> AbstractContextManager[None]:
    """Moves these layers' rotation into the attention for packed passes inside the block."""
    return with_forwards((layer.module, layer.forward()) for layer in layers)
