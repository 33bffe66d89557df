"""Refuses models that do more with a text than their forward does with its ids, or that look at all tokens of a pass
together: packed tokens and trees would lose or change it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedtree._arguments import refusal

# Methods that make the inputs of a forward from a text; packed tokens do without.
PREPARING = (
    *("prepare_inputs_for_generation", "_prepare_model_inputs", "_update_model_kwargs_for_generation", "_prefill"),
    *("_prepare_position_ids_for_generation", "_prepare_attention_mask_for_generation"),
)
# Kinds of peft's adapters that mix all tokens of a pass: by a router's mean, and in a second model.
MIXING = ("LILY", "SHADOW")
ALONE = "layers that treat each token by itself"


def _parts(model: Any) -> Iterator[Any]:
    """Yields the model, perhaps a wrapper such as peft's, and each model of transformers in it."""
    yield model
    yield from (part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model)


def check_preparation(model: Any) -> None:
    """Raises ValueError for soft prompts, adapters that search the text, and own methods that prepare inputs."""
    for part in _parts(model):
        for name, config in (getattr(part, "peft_config", None) or {}).items():
            kind = type(config).__name__
            if getattr(config, "is_prompt_learning", False) and not getattr(part, "_adapters_disabled", False):
                raise refusal("model", "no virtual tokens beside the ids", f"those of peft's {kind}")
            if getattr(config, "alora_invocation_tokens", None) and _is_active(part, name):
                raise refusal("model", ALONE, f"a {kind} that looks for its alora_invocation_tokens in the text")
            if getattr(config, "peft_type", None) in MIXING and _is_active(part, name):
                raise refusal("model", ALONE, f"peft's {kind}, which mixes the tokens of a pass")
    inner = next((part for part in _parts(model) if isinstance(part, PreTrainedModel)), model)
    for part, method in itertools.product((model, inner), PREPARING):
        if not _is_library(part, inner, method):
            own = getattr(getattr(part, method), "__qualname__", method)
            raise refusal("model", f"the {method} of transformers", f"{own}, which would not be called")
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise refusal("model", "causal layers", "a config with use_bidirectional_attention (a prefix LM)")


def _is_active(model: Any, adapter: str) -> bool:
    """Returns whether a layer of peft's uses the adapter, or none is known."""
    layers = [layer for layer in model.modules() if isinstance(getattr(layer, "disable_adapters", None), bool)]
    return not layers or any(adapter in layer.active_adapters for layer in layers if not layer.disable_adapters)


def _is_library(part: Any, inner: Any, method: str) -> bool:
    """Returns whether the method is of a class of transformers, or peft's, which calls the one of the inner model."""
    function = getattr(type(part), method, None)
    if method in vars(part):  # peft leaves the inner model's there
        of_class = ((owner, getattr(type(owner), method, None)) for owner in (part, inner))
        function = next((f for owner, f in of_class if f is not None and f.__get__(owner) == vars(part)[method]), None)
    if function is None:
        return method not in vars(part)
    roots = ("transformers",) if part is inner else ("transformers", "peft")
    modules = (getattr(f, "__globals__", {}).get("__name__", "") for f in (function, inspect.unwrap(function)))
    return all(module.partition(".")[0] in roots for module in modules)


def check_scales(model: nn.Module) -> None:
    """Raises ValueError for layers that scale the activations of a whole pass by one number."""
    for layer in model.modules():
        scaled = next((thing for thing in (layer, *layer._parameters.values()) if _scales_a_pass(thing)), None)
        if scaled is not None:
            raise refusal("model", ALONE, f"a {type(scaled).__name__} with one dynamic scale for all tokens of a pass")
        if type(layer).__module__.startswith("torch.ao.nn."):
            dynamic = "those of torch.ao.quantization (quantize_dynamic and others)"
            raise refusal("model", ALONE, f"{dynamic}, which scale all tokens of a pass together")


def _scales_a_pass(thing: Any) -> Any:
    """Looks at weights of torchao, within a DTensor, too, and at its layers for training."""
    if thing is None or type(thing) in (Tensor, nn.Parameter):
        return False
    if not isinstance(thing, Tensor):
        cast = getattr(vars(thing).get("config"), "cast_config_input", None)
        is_one = getattr(getattr(cast, "scaling_granularity", None), "name", None) == "TENSORWISE"
        return is_one or _is_one(getattr(thing._modules.get("activation_fake_quantizer"), "config", None))
    weight = getattr(thing, "_local_tensor", thing)
    kwargs, scale = getattr(weight, "act_quant_kwargs", None), getattr(weight, "act_quant_scale", None)
    return (_is_one(kwargs) and scale is None) or getattr(kwargs, "use_dynamic_per_tensor_scale", False)


def _is_one(config: Any) -> bool:
    return type(getattr(config, "granularity", None)).__name__ == "PerTensor"


def check_token_types(model: Any) -> None:
    """Raises ValueError for models that add the embedding of token 0 for token_type_ids of 0: GPT-2 and its kin."""
    table = model.get_input_embeddings()
    for part in _parts(model):
        if "token_type_ids" in inspect.signature(part.forward).parameters and table in part.children():
            raise refusal("input_ids", f"no token_type_ids, which {type(model).__name__} embeds as tokens")
