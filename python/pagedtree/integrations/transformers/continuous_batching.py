"""transformers' continuous batching (`model.generate_batch`) with our attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from pagedtree.integrations.transformers.attention import NAME, attention_forward
from pagedtree.integrations.transformers.model import check_model, use_attention
from pagedtree.integrations.transformers.recurrent import RECURRENT_KINDS
from pagedtree.integrations.transformers.rotary import check_constant

__all__ = ["continuous_batching", "paged_attention_forward"]

# The one name that transformers 5 lets through to continuous batching and that another function can be registered for.
PAGED_NAME = "paged|eager"
# The name's meaning on entry to each open block. Blocks may end in any order: the last one restores it.
_meant_before: list[Any] = []


@contextmanager
def continuous_batching(model: Any) -> Iterator[None]:
    """Makes `model.generate_batch` and continuous batching managers use our attention inside the block.

    Inside the block "paged|eager" means ours, in every model; use the model otherwise only outside. Raises ValueError
    for a model in training mode, with other layers than full and sliding attention, with rotary frequencies that depend
    on the longest sequence of a pass ("longrope", "dynamic"), or with latent attention (DeepSeek-V3), for which
    transformers makes too small a cache.
    """
    check_model(model)
    check_constant("continuous batching", model)
    _check_cache(model)
    interface = AttentionInterface()
    if PAGED_NAME not in interface:  # transformers 4.57 takes any name
        with use_attention(model, NAME):
            yield
        return
    _meant_before.append(interface[PAGED_NAME])
    AttentionInterface.register(PAGED_NAME, paged_attention_forward)
    try:
        with use_attention(model, PAGED_NAME):
            yield
    finally:
        AttentionInterface.register(PAGED_NAME, _meant_before.pop())


def _check_cache(model: nn.Module) -> None:
    config: Any = model.config
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) & RECURRENT_KINDS
    if kinds:
        raise ValueError(
            f"continuous batching: expected full and sliding attention alone, got {', '.join(sorted(kinds))}"
        )
    latent: list[Any] = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    for module in latent:
        expected = getattr(module.config, "head_dim", None)
        widths = getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None)
        if widths != (expected, expected):
            raise ValueError(
                f"continuous batching: expected keys and values of the config's head_dim {expected}, for which"
                f" transformers makes its cache, got {widths[0]} and {widths[1]} in {type(module).__name__}"
            )


def paged_attention_forward(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Runs `attention_forward` as "paged|eager"; raises ValueError for an ordinary pass, whose padding mask that name
    would miss."""
    if kwargs.get("cache") is None:
        raise ValueError(
            f'attention implementation "{PAGED_NAME}": expected a pass of continuous batching, got an ordinary one;'
            f' use "{NAME}" for those'
        )
    return attention_forward(module, query, *args, **kwargs)
