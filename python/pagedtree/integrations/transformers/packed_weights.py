"""Weights of linear layers in the packed form of oneDNN, in which CPUs multiply few rows faster.

torch's own product reads a weight row by row. oneDNN's reads blocks that lie in the order in which its kernel takes
them, so a pass over few tokens comes closer to the speed of the memory, and more tokens cost little more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pagedtree.integrations.transformers.turns import in_turn

__all__ = ["PackedLinear", "check_packable", "packed_weights", "pays"]

# Smaller weights stay as they are, by elements: the call itself takes oneDNN 15 us and torch 2 us. Measured on two
# AVX-512 cores at 1 to 32 rows. In fp32 smaller weights are as fast or faster unpacked.
MIN_ELEMENTS = {torch.bfloat16: 1 << 15, torch.float16: 1 << 15, torch.float32: 1 << 19}
# Packing a model and back takes what 16 to 22 passes gain by it, and there may be fewer passes than were planned.
MIN_PASSES = 64
# In fp32 and fp16 passes of one or two tokens are faster with dense weights; in bf16 none is.
MIN_TOKENS = 4
# Layers whose weights are multiplied without a call of the layer: of latent attention by us, of Mamba by transformers.
READ_DIRECTLY = {"kv_b_proj", "dt_proj"}


class PackedLinear(nn.Linear):
    """What a `torch.nn.Linear` is while its weight is packed."""

    def forward(self, input: Tensor) -> Tensor:
        # Not by self.weight and self.bias, which take longer to look up.
        weight, bias = cast(Tensor, self._parameters["weight"]), self._parameters["bias"]
        if input.dtype != weight.dtype or input.shape[-1:] != weight.shape[1:]:
            raise RuntimeError(
                f"packed_weights: expected input of {weight.dtype} and {weight.shape[1]} columns for a packed linear"
                f" layer, got {input.dtype} and shape {[*input.shape]}"
            )
        if torch.is_grad_enabled():
            return cast(Tensor, _ForwardOnly.apply(input, weight, bias))
        return _linear(input, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


class _ForwardOnly(torch.autograd.Function):
    """Without it torch would only warn that gradients stop at the op, and return none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("packed_weights: packed linear layers have no gradients; leave the block before backward()")


@dataclass
class _PackedWeight:
    """A weight in packed form, and the layers that compute with it.

    keeps_dense: whether the dense form has other users, so that it stays; else its memory is freed.
    """

    layers: list[nn.Linear]
    dense: nn.Parameter
    packed: nn.Parameter
    keeps_dense: bool

    @classmethod
    def of(cls, layers: list[nn.Linear], dense: nn.Parameter, keeps_dense: bool) -> _PackedWeight:
        with torch.inference_mode(False), torch.no_grad():
            data = torch.ops.mkldnn._reorder_linear_weight(dense.detach())
            packed = nn.Parameter(data, requires_grad=dense.requires_grad)
        return cls(layers, dense, packed, keeps_dense)

    def use(self) -> None:
        for layer in self.layers:
            layer._parameters["weight"] = self.packed
            layer.__class__ = PackedLinear
        if not self.keeps_dense:
            self.dense.data = self.dense.data.new_empty(0)

    def undo(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self.dense.numel() == 0:
                self.dense.data = self.packed.detach().to_dense()
                self.dense.requires_grad_(self.packed.requires_grad)
        for layer in self.layers:
            if layer._parameters.get("weight") is self.packed:  # else the caller gave it another one
                layer._parameters["weight"] = self.dense
            if type(layer) is PackedLinear:
                layer.__class__ = nn.Linear  # type: ignore[assignment]


@contextmanager
def packed_weights(*models: nn.Module) -> Iterator[int]:
    """Inside the block linear layers of the models compute with packed weights, on CPUs that oneDNN has them for.

    A pass over few tokens takes less time. `generate` packs for the time of a call where that pays; hold the block open
    over many calls to pack once. Whatever runs the models works in it, `model(...)` and `model.generate(...)` too, but
    not their training: backward raises RuntimeError.

    Each weight is packed by itself, and its dense form freed at once, so the models need no more memory. A matrix that
    is the embedding, too (tied weights), stays dense for the embedding and is packed besides. Inside the block `weight`
    of a packed layer is a parameter of the same shape and dtype in oneDNN's layout, which torch's dense operations
    refuse with an error: saving, moving and loading weights belong outside. At the end, also after an exception, the
    very same parameters have the very same bits again. Blocks may be nested; the inner one packs what is left. Packing
    waits for calls of `generate` on the models in other threads. Do not run them yourself in another thread meanwhile.

    Packed are layers of the exact type `torch.nn.Linear` on the CPU, in bf16 and fp16 (where oneDNN computes in them)
    with a weight of at least 32768 elements, in fp32 of at least 524288. Others stay as they are: subclasses,
    quantised, offloaded, sharded and parametrised layers; those whose weight is a part of a larger tensor or shares its
    memory with another parameter; kv_b_proj of latent attention and dt_proj of Mamba, whose weights are read directly.
    In fp32 and fp16 passes of one and two tokens take more time with packed weights, larger ones less.

    Results differ from those of dense weights by rounding. They have the same bits in each run. How the sums of a token
    are rounded may depend on how many tokens the pass has, as it may without packing.

    Args:
        models: the models, any torch.nn.Module.

    Yields how many layers it packed: 0 without oneDNN, or where none of the layers is of that kind. Raises TypeError
    for what is no module.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"models: expected torch.nn.Module, got {type(model).__name__}")
    packed: list[_PackedWeight] = []
    try:
        with in_turn(*models):
            for candidate in _candidates(models):
                packed.append(_PackedWeight.of(*candidate))
                packed[-1].use()
        yield sum(len(each.layers) for each in packed)
    finally:
        with in_turn(*models):
            while packed:
                packed.pop().undo()


def pays(model: Any, num_passes: int, num_tokens: int) -> bool:
    """Whether so many passes of `num_tokens` tokens are worth packing the model for them, and unpacking it again."""
    is_fast = model.dtype == torch.bfloat16 or num_tokens >= MIN_TOKENS
    return model.device.type == "cpu" and is_fast and num_passes >= MIN_PASSES


def check_packable(model: nn.Module) -> None:
    """Raises ValueError where nothing of the model can be packed; it says why."""
    if any(isinstance(module, PackedLinear) for module in model.modules()) or _candidates((model,)):
        return
    if not _dtypes():
        raise ValueError("pack_weights: expected a torch that has oneDNN's packed linear layers, got one without them")
    raise ValueError(
        "pack_weights: expected a model with linear layers (torch.nn.Linear) on the CPU in a dtype of"
        f" {', '.join(sorted(str(dtype) for dtype in _dtypes()))} that are large enough, got none in"
        f" {type(model).__name__}"
    )


def _dtypes() -> set[torch.dtype]:
    """What oneDNN multiplies in packed form on this machine."""
    ops = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return set()
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return set()
    found = {torch.float32}
    for dtype, name in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")):
        if hasattr(ops, name) and getattr(ops, name)():
            found.add(dtype)
    return found


def _candidates(models: tuple[nn.Module, ...]) -> list[tuple[list[nn.Linear], nn.Parameter, bool]]:
    """Each weight that can be packed: the layers that it is packed for, itself, and whether it has other users."""
    modules = list({id(module): module for model in models for module in model.modules()}.values())
    read_directly = {id(module._modules[name]) for module in modules for name in READ_DIRECTLY & module._modules.keys()}
    users: dict[int, int] = Counter()
    owners: dict[int, set[int]] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                users[id(tensor)] += 1
                owners.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(tensor))
    dtypes, layers = _dtypes(), cast(dict[int, list[Any]], {})
    for module in modules:
        if _is_plain(module, dtypes) and id(module) not in read_directly:
            layers.setdefault(id(module.weight), []).append(module)
    found = []
    for each in layers.values():
        weight = each[0].weight
        if len(owners[weight.untyped_storage().data_ptr()]) == 1:
            found.append((each, weight, users[id(weight)] > len(each)))
    return found


def _is_plain(module: nn.Module, dtypes: set[torch.dtype]) -> bool:
    """Whether it is a linear layer that does nothing but multiply by a dense weight, which is worth packing."""
    weight: Any = module._parameters.get("weight")
    if type(module) is not nn.Linear or "forward" in vars(module) or type(weight) is not nn.Parameter:
        return False
    if weight.device.type != "cpu" or weight.layout is not torch.strided or weight.dtype not in dtypes:
        return False
    is_whole = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
    has_bias_of_its_kind = module.bias is None or module.bias.dtype == weight.dtype
    return is_whole and has_bias_of_its_kind and weight.numel() >= MIN_ELEMENTS[weight.dtype]
