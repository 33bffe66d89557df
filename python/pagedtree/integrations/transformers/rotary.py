"""Rotary embeddings whose frequencies transformers chooses by the largest position of a pass.

Type "longrope" (Phi-3, Phi-4-mini) has other frequencies for texts of more than `original_max_position_embeddings`
tokens. Type "dynamic" changes with each token past `max_position_embeddings`. A packed pass rotates all sequences
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedtree._arguments import refusal
from pagedtree.generation.scheduler import GeneratedSequence

# transformers' names of these types; "dynamic" may be a part of one.
LONG, DYNAMIC = "longrope", "dynamic"


def _limits(model: Any) -> list[tuple[int, str]]:
    """Returns the numbers of tokens after which the model's frequencies change, with the rope types."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else None  # None: not transformers'
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = []
    for rope in (ropes, *ropes.values()):  # one for all layers, or one per layer type
        kind = (rope.get("rope_type") or rope.get("type") or "") if isinstance(rope, dict) else ""
        if kind == LONG:
            field = "original_max_position_embeddings"
            limits.append((rope.get(field) or getattr(config, field, None) or config.max_position_embeddings, kind))
        elif DYNAMIC in kind:
            # At exactly max_position_embeddings tokens transformers keeps the frequencies of an earlier longer text.
            limits.append((config.max_position_embeddings - 1, kind))
    return limits


def check_rotation(model: Any, sequences: Sequence[GeneratedSequence], is_recurrent: bool) -> int:
    """Returns the least max_batch_tokens with which every pass rotates these sequences alike. Raises ValueError if
    some text, but not every prompt, is past a limit of the model."""
    limits = _limits(model)
    if not limits or not sequences:
        return 0
    prompts = [sequence.prompt_len for sequence in sequences]
    longest = max(sequence.max_length for sequence in sequences)
    if longest - 1 <= min(limits)[0]:  # the last token is generated, but never read
        return 0
    # Passes of recurrent layers end at the end of shared tokens, wherever the limit is.
    can_exceed = not is_recurrent and all(kind == LONG for _, kind in limits)
    if can_exceed and min(prompts) > max(limits)[0]:
        return longest  # a pass without decoding sequences reads its first one to the end
    count, kind = min(limits)
    others = f", or only prompts of more than {max(limits)[0]}" if can_exceed else ""
    reason = f'as rope type "{kind}" of the model changes its frequencies after {count}'
    found = f"prompts of {min(prompts)} to {max(prompts)} tokens, and {longest} with max_new_tokens"
    advice = "ask for fewer, or for long and short texts in calls of their own"
    wanted = f"texts of at most {count + 1} tokens{others}, {reason}"
    raise refusal("input_ids, max_new_tokens", wanted, f"{found}: {advice}")


def check_constant(name: str, model: Any) -> None:
    """Raises ValueError, with the model's `name`, for frequencies that depend on the largest position of a pass."""
    for count, kind in _limits(model):
        raise refusal(name, "rotary frequencies that never change", f'rope type "{kind}" ({count})')
