"""Running a transformers model on packed tokens over a paged cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedtree.integrations.transformers.attention import NAME, register
from pagedtree.integrations.transformers.paged_step import PagedStep

__all__ = ["check_model", "run_packed", "use_attention"]


def check_model(model: Any) -> None:
    """Refuses models that cannot run on packed tokens with attention keys and values as their state.

    ValueError says why. What only shows in a layer is refused there: other masks, head sizes, layers that run twice.
    """
    if model.training:
        raise ValueError("model: expected evaluation mode, got training mode; call model.eval()")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or model.config.is_encoder_decoder:
        what = ", ".join(sorted(kinds)) or "an encoder and a decoder"
        raise ValueError(f"model: expected a decoder of full or sliding attention layers, got {what}")
    name = type(model).__name__
    if not _has(model, lambda inner: inner._can_set_attn_implementation()):
        raise ValueError(f"model: expected layers that use transformers' attention interface, {name} has its own")
    if not _takes_positions(model):
        raise ValueError(f"model: expected a forward that takes position_ids, that of {name} does not")
    # transformers 4.57 hands the keys of one layer to another in its cache, which is not used here.
    if getattr(config, "num_kv_shared_layers", 0) and any(
        getattr(module, "kv_shared_layer_index", None) is not None for module in model.modules()
    ):
        raise ValueError("model: expected layers that share keys without transformers' cache, as in transformers 5.23")


def _has(model: nn.Module, property_of: Callable[[Any], bool]) -> bool:
    """Whether it holds for the model, or for one in it: a language model beside a vision tower, say."""
    return any(property_of(inner) for inner in model.modules() if isinstance(inner, PreTrainedModel))


def _takes_positions(model: nn.Module) -> bool:
    """Whether position_ids are an argument of the model, or of one in it, to which it may hand its other arguments."""
    parameters = inspect.signature(model.forward).parameters
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "position_ids" in parameters or (
        hands_on and _has(model, lambda inner: "position_ids" in inspect.signature(inner.forward).parameters)
    )


@contextmanager
def use_attention(model: Any, name: str = NAME) -> Iterator[None]:
    """Inside the block the model uses the attention implementation `name`."""
    register()
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def run_packed(
    model: Any, input_ids: Tensor, positions: Tensor, step: PagedStep, rows: Tensor | None, needs_hidden: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One pass over packed tokens [T]: logits [R, V] at `rows` (int64 [R], None = all), and what the output layer read.

    The second is [R, H] if `needs_hidden`, else None. The model must be under `use_attention`. Raises ValueError if
    its layers did not come to our attention.
    """
    kwargs: dict[str, Any] = {}
    if rows is not None and "logits_to_keep" in inspect.signature(model.forward).parameters:
        kwargs["logits_to_keep"] = rows
    with step.active(), _captured_input(model.get_output_embeddings(), needs_hidden) as captured:
        logits = model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            attention_mask=step.mask.tokens,
            use_cache=False,
            **kwargs,
        ).logits[0]
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    if len(step.layers_run) != num_layers:
        raise ValueError(
            f"model: expected {num_layers} layers to use transformers' attention interface, {len(step.layers_run)} of"
            f" {type(model).__name__} did"
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "layer_types", None) is None and not step.mask.has_windows:
        raise ValueError(
            f"model: expected masks of the config's sliding_window {window}, which transformers' cache keeps, but"
            f" {type(model).__name__} asks for masks without a window"
        )
    hidden = captured[0].reshape(-1, captured[0].shape[-1]) if captured else None
    if rows is not None and not kwargs:
        logits, hidden = logits[rows], hidden[rows] if hidden is not None else None
    return logits, hidden


@contextmanager
def _captured_input(layer: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    captured: list[Tensor] = []
    if not wanted:
        yield captured
        return
    handle = layer.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    try:
        yield captured
    finally:
        handle.remove()
