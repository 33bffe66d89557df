"""Rotary embeddings whose frequencies transformers chooses by the longest sequence of a pass.

Type "longrope" (Phi-3, Phi-4-mini) has other frequencies for sequences of more than `original_max_position_embeddings`
tokens. Type "dynamic" changes with each token past `max_position_embeddings`. In a packed pass one sequence would
choose for all, so all must need the same frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["RotaryLimit", "check_constant", "check_rotation", "rotary_limit", "same_rotation"]

# transformers' names of these types; "dynamic" may be a part of one.
LONG, DYNAMIC = "longrope", "dynamic"


class RotaryLimit(NamedTuple):
    """The `num_tokens` up to which a sequence has the same frequencies, by the config's `field`. kind: the rope
    type."""

    num_tokens: int
    field: str
    kind: str

    def __str__(self) -> str:
        return f'rope type "{self.kind}" ({self.field}: {self.num_tokens})'


def rotary_limit(config: Any) -> RotaryLimit | None:
    """Returns the limit of a model's config; None if the frequencies never change."""
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = []
    for rope in (parameters, *parameters.values()):  # one for all layers, or one per layer type
        kind = (rope.get("rope_type") or rope.get("type") or "") if isinstance(rope, dict) else ""
        if kind == LONG:
            field = "original_max_position_embeddings"
            limit = rope.get(field) or getattr(config, field, None) or config.max_position_embeddings
            limits.append(RotaryLimit(int(limit), field, kind))
        elif DYNAMIC in kind:
            # At exactly max_position_embeddings tokens transformers keeps the frequencies of an earlier longer text.
            limits.append(RotaryLimit(config.max_position_embeddings - 1, "max_position_embeddings - 1", kind))
    if len(set(limits)) > 1:
        return min(limits)._replace(kind="several types")
    return limits[0] if limits else None


def check_rotation(name: str, model: Any, sequences: Iterable[GeneratedSequence]) -> bool:
    """Returns whether these sequences use the long-sequence frequencies, from their prompts on. Raises ValueError, with
    the model's `name`, if transformers would change the frequencies on the way."""
    limit = rotary_limit(model.config)
    lengths = [(len(sequence.tokens), sequence.max_length) for sequence in sequences]
    if limit is None or not lengths:
        return False
    first, last = zip(*lengths, strict=True)
    # The last token is generated, but no pass reads it.
    if max(last) - 1 <= limit.num_tokens:
        return False
    if limit.kind == LONG and min(first) > limit.num_tokens:
        return True
    expected = f"at most {limit.num_tokens + 1} tokens, prompt and max_new_tokens, in each sequence"
    if limit.kind == LONG:
        expected += f", or only prompts of more than {limit.num_tokens}"
    raise ValueError(
        f"{name}: expected {expected}, as its {limit} changes the frequencies of a whole pass there; got prompts of"
        f" {min(first)} to {max(first)} tokens, and up to {max(last)} with max_new_tokens"
    )


def check_constant(name: str, model: Any) -> None:
    """Raises ValueError, with the model's `name`, for frequencies that depend on the longest sequence of a pass."""
    limit = rotary_limit(model.config) if hasattr(model, "config") else None
    if limit is not None:
        raise ValueError(f"{name}: expected rotary frequencies that never change, got {limit}")


@contextmanager
def same_rotation(model: nn.Module, is_long: bool) -> Iterator[None]:
    """Rotates all passes inside the block with the frequencies of long or of short sequences, for sequences that
    `check_rotation` has accepted."""
    limit = rotary_limit(model.config)
    handles = []
    for module in model.modules() if limit is not None else ():
        kinds = getattr(module, "rope_type", None) or ""
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if limit is None or not any(kind == LONG or DYNAMIC in kind for kind in kinds):
            continue
        if is_long:  # one more position, past the limit, decides
            change = partial(nn.functional.pad, pad=(0, 1), value=limit.num_tokens)
            handles.append(module.register_forward_hook(_without_last))
        else:
            change = partial(torch.clamp, max=limit.num_tokens - 1)
        handles.append(module.register_forward_pre_hook(partial(_with_positions, change), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_positions(
    change: Callable[[Tensor], Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": change(kwargs["position_ids"])}
    return (args[0], change(args[1]), *args[2:]), kwargs


def _without_last(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output[..., :-1, :] if isinstance(output, Tensor) else tuple(tensor[..., :-1, :] for tensor in output)
