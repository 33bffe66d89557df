"""Weights of linear layers in oneDNN's packed form, in which CPUs multiply few rows faster.

oneDNN's product reads a weight in its kernel's order: a pass over few tokens comes closer to memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from pagedtree.integrations.transformers.forwards import uncompiled
from pagedtree.integrations.transformers.packed_linear import PackedLinear, PackedRows, SharedProduct, packed_form
from pagedtree.integrations.transformers.turns import in_turn
from pagedtree.integrations.transformers.weight_holders import WeightHolders, can_count

__all__ = ["PackedLinear", "check_packable", "packed_weights", "pays"]

# Smaller weights stay as they are, by elements: the call itself takes oneDNN 15 us and torch 2 us. Measured on two
# AVX-512 cores at 1 to 32 rows. In fp32 smaller weights are as fast or faster unpacked.
MIN_ELEMENTS = {torch.bfloat16: 1 << 15, torch.float16: 1 << 15, torch.float32: 1 << 19}
# Packing and unpacking costs as much as 16 to 22 passes gain, and there may be fewer passes than planned.
MIN_PASSES = 64
# In fp32 and fp16 passes of one or two tokens are faster with dense weights; in bf16 none is.
MIN_TOKENS = 4
# Layers whose weights are multiplied without a call of the layer: of latent attention by us, of Mamba by transformers.
READ_DIRECTLY = {"kv_b_proj", "dt_proj"}


# Layers of one module that read the same tensor, by the names that transformers gives them. They are packed as one
# matrix, since three small products take 50 us longer than one.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Parts of a module's name where these read different tensors: the keys of cross-attention come from an encoder.
APART = ("cross", "encoder")


class _Weight(NamedTuple):
    """A packable weight, its layers, and whether others keep its dense form."""

    layers: list[nn.Linear]
    dense: nn.Parameter
    keeps_dense: bool


@dataclass
class _Packed:
    """A packed matrix, one weight or several of sibling layers stacked by rows, and the layers' stand-ins."""

    weights: list[_Weight]
    matrix: Tensor
    stand_ins: list[nn.Parameter]

    @classmethod
    def of(cls, weights: list[_Weight]) -> _Packed:
        with torch.inference_mode(False), torch.no_grad():
            if len(weights) == 1:
                dense = weights[0].dense
                parameter = nn.Parameter(packed_form(dense.detach()), requires_grad=dense.requires_grad)
                return cls(weights, parameter, [parameter])
            matrix = packed_form(torch.cat([weight.dense for weight in weights]))
            product = SharedProduct([weight.layers[0] for weight in weights], matrix)
            rows = [PackedRows(product, i, w.dense, w.dense.requires_grad) for i, w in enumerate(weights)]
            return cls(weights, matrix, cast(list[nn.Parameter], rows))

    def use(self) -> None:
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            for layer in weight.layers:
                layer._parameters["weight"] = stand_in
                layer.__class__ = PackedLinear
        for weight in self.weights:
            if not weight.keeps_dense:
                weight.dense.data = weight.dense.data.new_empty(0)

    def undo(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if any(weight.dense.numel() == 0 for weight in self.weights):
                parts = self.matrix.detach().to_dense().split([len(stand_in) for stand_in in self.stand_ins])
                for weight, stand_in, part in zip(self.weights, self.stand_ins, parts, strict=True):
                    if weight.dense.numel() == 0:
                        weight.dense.data = part if len(parts) == 1 else part.clone()
                        weight.dense.requires_grad_(stand_in.requires_grad)
        for weight, stand_in in zip(self.weights, self.stand_ins, strict=True):
            for layer in weight.layers:
                if layer._parameters.get("weight") is stand_in:  # else the caller gave it another one
                    layer._parameters["weight"] = weight.dense
                if type(layer) is PackedLinear:
                    layer.__class__ = nn.Linear  # type: ignore[assignment]


@contextmanager
def packed_weights(*models: nn.Module, copy_held: bool = True) -> Iterator[int]:
    """Runs linear layers of the models with packed weights inside the block, on CPUs where oneDNN has them.

    `generate` packs for one call where that pays; hold the block open over many calls to pack once. `model(...)` and
    `model.generate(...)` work inside the block; backward raises RuntimeError.

    Dense forms are freed one by one. Tied weights stay dense, too, and weights held elsewhere: another module, an
    optimizer or a variable has the parameter, or another tensor, a NumPy view or another process shares its memory;
    values written there meanwhile count after the block. An array passed to `torch.from_numpy` is not detected.

    q_proj, k_proj and v_proj of a module share a product, and gate_proj and up_proj another. Inside the block torch's
    dense operations refuse a packed `weight`: save, move and load weights outside, and keep torch.autocast outside. A
    compiled model runs uncompiled. At the end, also after an exception, the same parameters have the same bits again.
    Blocks may be nested. Do not run the models in other threads meanwhile.

    Layers of the exact type `torch.nn.Linear` on the CPU are packed from 32768 elements in bf16 and fp16 (where oneDNN
    computes in them), from 524288 in fp32; not quantised, offloaded, sharded and parametrised ones, nor kv_b_proj of
    latent attention and dt_proj of Mamba. In fp32 and fp16, packed weights slow down passes of one and two tokens.
    Results differ from dense weights by rounding, which may depend on the number of tokens in the pass, and are
    reproducible bit for bit.

    copy_held: whether to pack weights held elsewhere, too, which doubles their memory. Yields the number of packed
    layers: 0 without oneDNN or without such layers. Raises TypeError for a non-module.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"models: expected torch.nn.Module, got {type(model).__name__}")
    packed: list[_Packed] = []
    stack = ExitStack()
    try:
        with in_turn(*models):
            for weights in _candidates(models, copy_held):
                packed.append(_Packed.of(weights))
                packed[-1].use()
            for model in models if packed else ():
                stack.enter_context(uncompiled(model))
        yield sum(len(weight.layers) for group in packed for weight in group.weights)
    finally:
        with in_turn(*models), stack:
            while packed:
                packed.pop().undo()


def pays(model: Any, num_passes: int, num_tokens: int) -> bool:
    """Returns whether so many passes of `num_tokens` tokens are worth packing and unpacking the model."""
    is_fast = model.dtype == torch.bfloat16 or num_tokens >= MIN_TOKENS
    is_dense = torch.is_autocast_enabled("cpu")  # which converts dense weights alone
    return model.device.type == "cpu" and not is_dense and is_fast and num_passes >= MIN_PASSES


def check_packable(model: nn.Module) -> None:
    """Raises ValueError, with the reason, if nothing of the model can be packed."""
    if torch.is_autocast_enabled("cpu"):
        raise ValueError(
            "pack_weights: expected None or False within torch.autocast, which converts dense weights alone"
        )
    with in_turn(model):  # another thread may be packing
        if any(isinstance(module, PackedLinear) for module in model.modules()) or _candidates((model,), True):
            return
    if not _dtypes():
        raise ValueError("pack_weights: expected a torch that has oneDNN's packed linear layers, got one without them")
    raise ValueError(
        "pack_weights: expected a model with linear layers (torch.nn.Linear) on the CPU in a dtype of"
        f" {', '.join(sorted(str(dtype) for dtype in _dtypes()))} that are large enough, got none in"
        f" {type(model).__name__}"
    )


def _dtypes() -> set[torch.dtype]:
    ops = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return set()
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise") and can_count()):
        return set()
    dtypes = {torch.float32}
    for dtype, name in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")):
        if hasattr(ops, name) and getattr(ops, name)():
            dtypes.add(dtype)
    return dtypes


def _candidates(models: tuple[nn.Module, ...], copy_held: bool) -> list[list[_Weight]]:
    named = {id(module): (name, module) for model in models for name, module in model.named_modules()}
    modules = [module for _, module in named.values()]
    read_directly = {id(module._modules[name]) for module in modules for name in READ_DIRECTLY & module._modules.keys()}
    dtypes, layers = _dtypes(), cast(dict[int, list[Any]], {})
    for module in modules:
        if _is_plain(module, dtypes) and id(module) not in read_directly:
            layers.setdefault(id(module.weight), []).append(module)
    weights: dict[int, _Weight] = {}  # by the first of its layers
    holders = WeightHolders(modules)
    for key, members in layers.items():
        is_held = holders.has_others(members[0])
        if copy_held or not is_held:
            weights[id(members[0])] = _Weight(members, members[0].weight, is_held or holders.users[key] > len(members))
    groups = []
    for name, module in named.values():
        for names in SIBLINGS if not any(part in name for part in APART) else ():
            group = _siblings([weights.get(id(module._modules.get(child_name))) for child_name in names])
            groups.append(group)
            for weight in group:
                del weights[id(weight.layers[0])]
    groups += [[weight] for weight in weights.values()]
    sizes = [sum(weight.dense.numel() for weight in group) for group in groups]
    return [g for g, size in zip(groups, sizes, strict=True) if g and size >= MIN_ELEMENTS[g[0].dense.dtype]]


def _siblings(weights: list[_Weight | None]) -> list[_Weight]:
    group = [weight for weight in weights if weight is not None]
    kinds = {(weight.dense.shape[1], weight.dense.dtype, weight.layers[0].bias is None) for weight in group}
    is_alone = all(len(weight.layers) == 1 for weight in group)
    return group if len(group) > 1 and len(kinds) == 1 and is_alone else []


def _is_plain(module: nn.Module, dtypes: set[torch.dtype]) -> bool:
    weight: Any = module._parameters.get("weight")
    if type(module) is not nn.Linear or "forward" in vars(module) or type(weight) is not nn.Parameter:
        return False
    if weight.device.type != "cpu" or weight.layout is not torch.strided or weight.dtype not in dtypes:
        return False
    has_bias_of_its_kind = module.bias is None or module.bias.dtype == weight.dtype
    return weight.is_contiguous() and has_bias_of_its_kind and weight.numel() > 0
