"""Recurrent layers of transformers 5.23 in packed passes: gated delta rules, Mamba-2, and short convolutions.

A packed pass replaces the layer's functions for convolution and recurrence by the ops on trees and packed sequences.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pagedtree._arguments import refusal
from pagedtree.generation.recurrent_step import RecurrentStep
from pagedtree.integrations.transformers.forwards import compiled_from, with_forwards, with_functions
from pagedtree.integrations.transformers.packed_pass import current_pass

# Layer kinds, by their config names, with a recurrent layer, alone or with attention.
RECURRENT_KINDS = {"linear_attention", "hybrid", "conv"}
# The supported recurrent layers, by their function for a whole sequence; the convolution is separate.
GATED_DELTA, KIMI_DELTA, MAMBA2 = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"
CONVOLUTION = "causal_conv1d_fn"
KNOWN = {
    "Qwen3NextGatedDeltaNet": GATED_DELTA,
    "Qwen3_5GatedDeltaNet": GATED_DELTA,
    "Qwen3_5MoeGatedDeltaNet": GATED_DELTA,
    "OlmoHybridGatedDeltaNet": GATED_DELTA,
    "KimiLinearDeltaAttention": KIMI_DELTA,
    "BailingHybridDeltaAttention": KIMI_DELTA,
    "NemotronHMamba2Mixer": MAMBA2,
    "BambaMixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "FalconH1Mixer": MAMBA2,
    "Lfm2ShortConv": CONVOLUTION,
    "Lfm2MoeShortConv": CONVOLUTION,
    "Lfm3ShortConv": CONVOLUTION,
}
# A layer's head sizes of keys and values, and which `tree_delta_rule` has.
HEAD_DIMS: dict[str, tuple[str, ...]] = {
    GATED_DELTA: ("head_k_dim", "head_v_dim"),
    KIMI_DELTA: ("head_dim",),
    MAMBA2: ("ssm_state_size", "head_dim"),
    CONVOLUTION: (),
}
HEAD_DIM_STEP, MOST_HEAD_DIM = 8, 256


def recurrent_layers(model: Any) -> list[nn.Module]:
    """Returns the recurrent layers. Raises ValueError for unknown kinds, modified layers, and sizes that the ops do not
    support."""
    layers = [module for module in model.modules() if type(module).__name__ in KNOWN]
    for layer in layers:
        _check(layer)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    stateful = (module for module in model.modules() if hasattr(module, "layer_idx"))
    stateful = (module for module in stateful if "cache_params" in inspect.signature(module.forward).parameters)
    others = {type(module).__name__ for module in stateful} - KNOWN.keys()
    if others or len(layers) != sum(kind in RECURRENT_KINDS for kind in kinds):
        names = ", ".join(sorted(others)) or f"others in {type(model).__name__}"
        raise refusal("model", f"recurrent layers among {', '.join(KNOWN)}", names)
    return layers


def _check(layer: Any) -> None:
    name = type(layer).__name__
    rule = KNOWN[name]
    if not {CONVOLUTION, rule} <= set(inspect.unwrap(type(layer).forward).__code__.co_names):
        raise refusal("model", f"{name} as transformers 5.23 writes it", f"one that does not call {rule}")
    if "forward" in vars(layer) and compiled_from(layer) is None:  # it would not be called
        raise refusal("model", f"{name} as it was made", "one whose forward was replaced (offloaded?)")
    activation = getattr(layer, "activation", None)
    if activation not in ("silu", "swish", None):
        raise refusal("model", f"convolutions with silu in {name}", activation)
    for size in HEAD_DIMS[rule]:
        if getattr(layer, size) % HEAD_DIM_STEP or getattr(layer, size) > MOST_HEAD_DIM:
            wanted = f"{size} of {name} to be a multiple of {HEAD_DIM_STEP} up to {MOST_HEAD_DIM}"
            raise refusal("model", wanted, getattr(layer, size))


def on_trees(layers: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Makes these layers run packed passes (`PackedPass`) inside the block; other passes stay unchanged."""
    return with_forwards((layer, _forward_of(layer)) for layer in layers)


def _forward_of(layer: Any) -> Callable[..., Tensor]:
    from transformers.integrations.accelerate import force_accelerate_hooks  # not in 4.57

    forward = inspect.unwrap(type(layer).forward)
    functions = {name: forward.__globals__[name] for name in (CONVOLUTION, KNOWN[type(layer).__name__])}
    ours = {name: partial(_in_packed_pass, _OURS[name], functions[name], layer.layer_idx) for name in functions}
    hooks = force_accelerate_hooks("conv1d" if hasattr(layer, "conv1d") else "conv")
    return MethodType(hooks(with_functions(forward, **ours)), layer)


def _in_packed_pass(ours: Callable[..., Any], own: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
    packed = current_pass.get()
    if packed is None:
        return own(*args, **kwargs)
    assert packed.step.recurrent is not None
    return ours(packed.step.recurrent, layer, *args, **kwargs)


def _convolve(
    step: RecurrentStep,
    layer: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Replaces causal_conv1d_fn: hidden_states [1, C, T] -> [1, C, T]. activation: silu, checked by `_check`."""
    x = hidden_states[0].T
    x = x if x.stride(-1) == 1 else x.contiguous()
    return step.convolve(layer, x, weight, bias, "silu" if activation else None).T[None]


def _delta_rule(
    step: RecurrentStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Replaces the gated delta rules: query, key [1, T, Hk, Dk], value [1, T, H, Dv] -> [1, T, H, Dv]. g: [1, T, H], or
    [1, T, H, Dk] of Kimi's rule. beta: [1, T, H]."""
    options = {"l2norm": use_qk_l2norm_in_kernel, "scale": query.shape[-1] ** -0.5}
    out = step.delta_rule(layer, query[0], key[0], value[0], g[0].float(), beta[0].float(), **options)
    return out[None], None


def _scan(
    step: RecurrentStep,
    layer: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **kwargs: Any,
) -> Tensor:
    """Replaces Mamba-2's scan: hidden_states [1, T, H, P], dt [1, T, H], A [H], B, C [1, T, G, N] -> [1, T, H, P].
    dt_limit bounds dt in prompts only, as in transformers."""
    x = hidden_states[0]
    dt = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    dt = nn.functional.softplus(dt) if dt_softplus else dt
    dt = torch.where(step.is_generated[:, None], dt, dt.clamp(*dt_limit)).float()
    v = (x.float() * dt[..., None]).to(x.dtype)
    out = step.delta_rule(layer, C[0], B[0], v, dt * A.float(), None, l2norm=False, scale=1.0).float()
    return (out if D is None else out + D[:, None].float() * x.float())[None]


_OURS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: _convolve,
    GATED_DELTA: _delta_rule,
    KIMI_DELTA: _delta_rule,
    MAMBA2: _scan,
}
