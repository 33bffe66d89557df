"""Weights of linear layers in oneDNN's packed form, in which CPUs multiply few rows faster."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from pagedtree._arguments import refusal
from pagedtree.integrations.transformers.forwards import uncompiled
from pagedtree.integrations.transformers.turns import in_turn

# Smaller weights stay as they are, by elements: the call itself takes oneDNN 15 us and torch 2 us. Measured on two
# AVX-512 cores at 1 to 32 rows. In fp32 smaller weights are as fast or faster unpacked.
MIN_ELEMENTS = {torch.bfloat16: 1 << 15, torch.float16: 1 << 15, torch.float32: 1 << 19}
# Layers whose weights are multiplied without a call of the layer: of latent attention by us, of Mamba by transformers.
READ_DIRECTLY = {"kv_b_proj", "dt_proj"}


class PackedLinear(nn.Linear):
    """Replaces a `torch.nn.Linear` while its weight is packed."""

    def forward(self, input: Tensor) -> Tensor:
        # Not by self.weight and self.bias, which take longer to look up.
        weight, bias = cast(Tensor, self._parameters["weight"]), self._parameters["bias"]
        if input.dtype != weight.dtype or input.shape[-1:] != weight.shape[1:]:
            wanted = f"{weight.dtype} and {weight.shape[1]} columns for a packed linear layer"
            found = f"{input.dtype} and shape {[*input.shape]}"
            found += " within torch.autocast" * torch.is_autocast_enabled("cpu")
            raise refusal("input", wanted, found, RuntimeError, "packed_weights")
        product = _ForwardOnly.apply if torch.is_grad_enabled() else _product
        return cast(Tensor, product(input, weight, bias))


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out


class _ForwardOnly(torch.autograd.Function):
    """Raises in backward, where torch would only warn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return _product(x, packed, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("packed_weights: packed linear layers have no gradients; leave the block before backward()")


class _Packed:
    """The packed weight of these layers. Its dense form is freed, unless anything else holds it."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers, dense = layers, layers[0].weight
        with torch.inference_mode(False), torch.no_grad():
            packed = torch.ops.mkldnn._reorder_linear_weight(dense.detach())
            self.weight = nn.Parameter(packed, requires_grad=dense.requires_grad)
        vars(self.weight).update(vars(dense))
        self.dense, self.kept = weakref.ref(dense), dense if _must_stay(dense) else None

    def use(self) -> None:
        for layer in self.layers:
            layer._parameters["weight"] = self.weight
            layer.__class__ = PackedLinear

    def undo(self) -> None:
        dense: Any = self.dense()
        if dense is None:
            with torch.inference_mode(False), torch.no_grad():
                dense = nn.Parameter(self.weight.detach().to_dense(), requires_grad=self.weight.requires_grad)
            vars(dense).update(vars(self.weight))
        for layer in self.layers:
            if layer._parameters.get("weight") is self.weight:  # else the caller gave it another one
                layer._parameters["weight"] = dense
            if type(layer) is PackedLinear:
                layer.__class__ = nn.Linear  # type: ignore[assignment]


def _must_stay(weight: Any) -> bool:
    """Returns whether the parameter has a gradient or hooks, or other tensors or processes use its memory."""
    storage = weight.untyped_storage()
    is_read = storage.is_shared() or torch._C._storage_Use_Count(storage._cdata) > 2  # by the weight and by `storage`
    return is_read or weight.grad is not None or bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


@contextmanager
def packed_weights(*models: nn.Module) -> Iterator[int]:
    """Runs linear layers of the models with packed weights inside the block, on CPUs where oneDNN has them.

    Pass a drafter's `networks`, too. Packing and unpacking take as long as about 20 passes gain: keep the block open
    over many calls. At its end, also after an exception, the models have their parameters again, with the same bits.

    Inside it only run the models, in one thread: torch's dense operations on a packed `weight` (to train, save, load or
    move it), backward, and passes within torch.autocast raise RuntimeError. A compiled model runs uncompiled. Blocks
    may be nested.

    Layers of the exact type `torch.nn.Linear` on the CPU are packed from 32768 elements in bf16 and fp16 (where oneDNN
    computes in them), from 524288 in fp32; not quantised, offloaded, sharded and parametrised ones, nor kv_b_proj of
    latent attention and dt_proj of Mamba. In fp32 and fp16, packed weights slow down passes of one and two tokens.
    Results differ from dense weights by rounding, and repeat bit for bit.

    A dense form is freed unless something else holds the parameter or its memory: a tied embedding, another module, an
    optimizer, a view, another process. An array passed to `torch.from_numpy` is not detected, and loses the weight.

    Yields the number of packed layers: 0 without oneDNN or without such layers. Raises TypeError for a non-module.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise refusal("models", "torch.nn.Module", type(model).__name__, TypeError)
    packed: list[_Packed] = []
    stack = ExitStack()
    try:
        with in_turn(*models):
            for layers in _candidates(models):
                packed.append(_Packed(layers))
                packed[-1].use()
            for model in models if packed else ():
                stack.enter_context(uncompiled(model))
        yield sum(len(weight.layers) for weight in packed)
    finally:
        with in_turn(*models), stack:
            while packed:
                packed.pop().undo()


def _candidates(models: tuple[nn.Module, ...]) -> list[list[nn.Linear]]:
    modules = {id(module): module for model in models for module in model.modules()}.values()
    read_directly = {id(module._modules[name]) for module in modules for name in READ_DIRECTLY & module._modules.keys()}
    dtypes, layers = _dtypes(), cast(dict[int, list[Any]], {})
    for module in modules:
        if _is_plain(module, dtypes) and id(module) not in read_directly:
            layers.setdefault(id(module.weight), []).append(module)
    return list(layers.values())


def _dtypes() -> set[torch.dtype]:
    ops = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return set()
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return set()
    dtypes = {torch.float32}
    for dtype, name in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")):
        if hasattr(ops, name) and getattr(ops, name)():
            dtypes.add(dtype)
    return dtypes


def _is_plain(module: nn.Module, dtypes: set[torch.dtype]) -> bool:
    weight: Any = module._parameters.get("weight")
    if type(module) is not nn.Linear or "forward" in vars(module) or type(weight) is not nn.Parameter:
        return False
    if weight.device.type != "cpu" or weight.layout is not torch.strided or weight.dtype not in dtypes:
        return False
    has_bias_of_its_kind = module.bias is None or module.bias.dtype == weight.dtype
    return weight.is_contiguous() and has_bias_of_its_kind and weight.numel() >= MIN_ELEMENTS[weight.dtype]
