"""The parts of the target that heads use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagedtree import attention_plan
from pagedtree.generation.drafters.checkpoint_config import ConfigEntries
from pagedtree.generation.packed_model import PackedModel

__all__ = ["Target", "check_attention", "check_place"]


class Target(NamedTuple):
    """The parts of a causal language model that heads are made for.

    hidden_size: width of the outputs of its `num_layers` decoder layers. vocab_sizes: its possible numbers of tokens:
    by its config, and with the padding of either layer.
    """

    embed_tokens: nn.Module
    lm_head: Any
    hidden_size: int
    num_layers: int
    vocab_sizes: frozenset[int]

    @classmethod
    def of(cls, model: Any) -> Target:
        """Returns the parts of a model of transformers. Raises ValueError without an output layer."""
        embed_tokens, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(getattr(lm_head, "weight", None), Tensor):
            raise ValueError(f"model: expected an output layer with weights, got {type(lm_head).__name__}")
        config = model.config.get_text_config()
        sizes = {config.vocab_size, embed_tokens.weight.shape[0], lm_head.weight.shape[0]}
        return cls(embed_tokens, lm_head, config.hidden_size, config.num_hidden_layers, frozenset(sizes))

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the output layer, which heads use too. Raises ValueError if it is quantized."""
        weight: Tensor = self.lm_head.weight
        if not weight.is_floating_point():
            raise ValueError(f"model: expected an output layer that is not quantized, got {weight.dtype}")
        return weight.device, weight.dtype

    def check(self, entries: ConfigEntries, key: str, size: int) -> None:
        if size not in self.vocab_sizes:
            entries.refuse(key, f"the target's {' or '.join(map(str, sorted(self.vocab_sizes)))} tokens", size)


def check_attention(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises ValueError, from the op itself, for heads that `tree_attention` does not support."""
    empty = torch.zeros(0, dtype=torch.int32)
    heads: dict[str, Any] = {"num_q_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    attention_plan(empty, empty.new_zeros(1), **heads, page_size=1, max_seqlen_q=1)


def check_place(weights: Iterable[Tensor], model: PackedModel) -> None:
    """Raises ValueError for drafter weights on another device or of another dtype than the target."""
    like = model.new_hidden(0)
    for weight in weights:
        if weight.is_floating_point() and (weight.device, weight.dtype) != (like.device, like.dtype):
            raise ValueError(
                f"drafter: expected weights in the target's {like.dtype} on {like.device}, got {weight.dtype} on"
                f" {weight.device}; see its .to()"
            )
