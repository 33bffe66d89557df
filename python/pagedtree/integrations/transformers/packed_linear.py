"""Linear layers over weights in oneDNN's packed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "PackedRows", "SharedProduct", "packed_form"]


class PackedLinear(nn.Linear):
    """Replaces a `torch.nn.Linear` while its weight is packed."""

    def forward(self, input: Tensor) -> Tensor:
        # Not by self.weight and self.bias, which take longer to look up.
        weight, bias = cast(Tensor, self._parameters["weight"]), self._parameters["bias"]
        if input.dtype != weight.dtype or input.shape[-1:] != weight.shape[1:]:
            raise RuntimeError(
                f"packed_weights: expected input of {weight.dtype} and {weight.shape[1]} columns for a packed linear"
                f" layer, got {input.dtype} and shape {[*input.shape]}"
                + " within torch.autocast"
                * torch.is_autocast_enabled("cpu")
            )
        if torch.is_grad_enabled():
            return cast(Tensor, _ForwardOnly.apply(input, weight, bias))
        return _linear(input, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if type(weight) is PackedRows:
        return weight.product.of(x, weight.place)
    return _multiply(x, weight, bias)


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out


def packed_form(dense: Tensor) -> Tensor:
    """Returns a matrix in oneDNN's packed form."""
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(dense)
    return out


class _ForwardOnly(torch.autograd.Function):
    """Raises in backward, where torch would only warn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = _linear(x, weight, bias)
        # Autograd would let nobody change a part of a product in place.
        return out.clone() if type(weight) is PackedRows else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("packed_weights: packed linear layers have no gradients; leave the block before backward()")


class _Outputs(NamedTuple):
    input: Tensor
    state: int | Tensor
    parts: list[Tensor | None]


class SharedProduct:
    """One product for layers that read the same tensor: the first one that is called computes the outputs of all.

    The others take theirs, once, if called with the same unchanged tensor. The packed matrix's rows are the layers'
    stacked weights; all have a bias, or none has.
    """

    def __init__(self, layers: Sequence[nn.Linear], packed: Tensor) -> None:
        self.layers, self.packed = list(layers), packed
        self._sizes = [layer.out_features for layer in layers]
        self._last: _Outputs | None = None

    def of(self, x: Tensor, place: int) -> Tensor:
        """Returns the output of layer `place` for x [..., in_features]: [..., its out_features]."""
        last = self._last  # read once, as another thread may put its own there
        part = last.parts[place] if last is not None and last.input is x and _is_in(x, last.state) else None
        if last is None or part is None:
            biases = [cast(Tensor, layer._parameters["bias"]) for layer in self.layers]
            out = _multiply(x, self.packed, None if biases[0] is None else torch.cat(biases))
            last = self._last = _Outputs(x, _state_of(x), list(out.split_with_sizes(self._sizes, -1)))
            part = cast(Tensor, last.parts[place])
        last.parts[place] = None
        if not any(output is not None for output in last.parts) and self._last is last:
            self._last = None
        return part

    def rows(self, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        """Returns the layers' weights in dense form; takes the arguments of `to_dense`."""
        return self.packed.to_dense(*args, **kwargs).split_with_sizes(self._sizes)


def _state_of(x: Tensor) -> int | Tensor:
    """Returns x's version, or a copy where tensors have none, to detect changes."""
    return x.clone() if x.is_inference() else x._version


def _is_in(x: Tensor, state: int | Tensor) -> bool:
    return torch.equal(x, state) if isinstance(state, Tensor) else x._version == state


class PackedRows(Tensor):
    """The weight of a layer of a `SharedProduct`: a packed parameter's shape, dtype and flags, without memory. All
    operations but `to_dense` raise RuntimeError."""

    product: SharedProduct
    place: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, product: SharedProduct, place: int, like: Tensor, requires_grad: bool) -> PackedRows:
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "layout": product.packed.layout}
        rows: PackedRows = Tensor._make_wrapper_subclass(cls, like.shape, requires_grad=requires_grad, **kind)
        rows.product, rows.place = product, place
        rows._is_param = True  # by which isinstance knows an nn.Parameter
        return rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        rows, *others = args
        if func is torch.ops.aten.detach.default:
            return cls(rows.product, rows.place, rows, False)
        if func is torch.ops.aten._to_dense.default:
            return rows.product.rows(*others, **(kwargs or {}))[rows.place].clone()
        raise RuntimeError(f"packed_weights: expected no {func} on a packed weight; leave the block before")
