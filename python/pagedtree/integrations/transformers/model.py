"""Running a transformers model on packed tokens over a paged cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pagedtree.integrations.transformers.attention import NAME, register
from pagedtree.integrations.transformers.paged_step import PagedStep

__all__ = ["check_model", "run_packed", "use_attention"]


def check_model(model: Any) -> None:
    """Refuses models whose state is not all in attention keys and values; ValueError says why."""
    if model.training:
        raise ValueError("model: expected evaluation mode, got training mode; call model.eval()")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or model.config.is_encoder_decoder:
        what = ", ".join(sorted(kinds)) or "an encoder and a decoder"
        raise ValueError(f"model: expected a decoder of full or sliding attention layers, got {what}")


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
            # A mask of four dimensions is handed to the layers as it is: none is built, and ours do not read it.
            attention_mask=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=input_ids.device),
            use_cache=False,
            **kwargs,
        ).logits[0]
    num_layers = model.config.get_text_config().num_hidden_layers
    if step.layers_run != num_layers:
        raise ValueError(
            f"model: expected {num_layers} layers to use transformers' attention interface, {step.layers_run} of"
            f" {type(model).__name__} did"
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
