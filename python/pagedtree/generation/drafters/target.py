"""The parts of the target that heads use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagedtree import attention_plan
from pagedtree._arguments import refusal
from pagedtree.generation.drafters.checkpoint_config import ConfigEntries
from pagedtree.generation.packed_model import PackedModel

SHARDED = "an embedding and an output layer in one piece for a draft head", "shards (DTensor, FSDP2)"
DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class Target(NamedTuple):
    """The parts of a causal language model that heads are made for.

    hidden_size, dtype: of the outputs of its `num_layers` decoder layers. vocab_sizes: its possible numbers of tokens:
    by its config, and with the padding of either layer.
    """

    embed_tokens: nn.Module
    lm_head: Any
    hidden_size: int
    num_layers: int
    vocab_sizes: frozenset[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any) -> Target:
        """Returns the parts of a model of transformers. Raises ValueError without an output layer, or if it or the
        embedding is offloaded."""
        embed_tokens, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(getattr(lm_head, "weight", None), Tensor):
            raise refusal("model", "an output layer with weights", type(lm_head).__name__)
        if is_offloaded(embed_tokens) or is_offloaded(lm_head):
            raise refusal("model", "an embedding and an output layer in memory for a draft head", "offloaded")
        config = model.config.get_text_config()
        sizes = {config.vocab_size, embed_tokens.weight.shape[0], lm_head.weight.shape[0]}
        return cls(
            embed_tokens, lm_head, config.hidden_size, config.num_hidden_layers, frozenset(sizes), dtype_of(model)
        )

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of heads. Raises ValueError if the output layer is quantized."""
        weight: Tensor = self.lm_head.weight
        if not weight.is_floating_point():
            raise refusal("model", "an output layer that is not quantized", weight.dtype)
        return weight.device, self.dtype

    def check(self, entries: ConfigEntries, key: str, size: int) -> None:
        if size not in self.vocab_sizes:
            entries.refuse(key, f"the target's {' or '.join(map(str, sorted(self.vocab_sizes)))} tokens", size)


def check_attention(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises ValueError, from the op itself, for heads that `tree_attention` does not support."""
    empty = torch.zeros(0, dtype=torch.int32)
    heads: dict[str, Any] = {"num_q_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    attention_plan(empty, empty.new_zeros(1), **heads, page_size=1, max_seqlen_q=1)


def is_offloaded(layer: nn.Module) -> bool:
    """Returns whether accelerate brings weights for a forward only."""
    weights = (weight for inner in layer.modules() if hasattr(inner, "_hf_hook") for weight in inner.parameters())
    return any(weight.is_meta for weight in weights)


def dtype_of(model: Any) -> torch.dtype:
    """Returns the dtype of a model's hidden states: some norms, the output layer and so a tied embedding may be in fp32
    over a body of bf16 or fp16."""
    decoder = getattr(model, "get_decoder", nn.Module)() or nn.Module()  # vLLM's ends have none
    parts = (model.get_input_embeddings(), *decoder.children())  # the last norm among them
    found: set[Any] = {getattr(getattr(part, "weight", None), "dtype", None) for part in parts}
    dtype: torch.dtype = min(found & DTYPES or {model.dtype}, key=lambda dtype: dtype.itemsize)
    return dtype


def check_place(weights: Iterable[Tensor], model: PackedModel, shared: Iterable[Tensor] = ()) -> None:
    """Raises ValueError for drafter weights on another device or of another dtype than the target's hidden states.
    shared: the target's weights, of any dtype."""
    like = model.new_hidden(0)
    for weight in weights:
        if weight.is_floating_point() and (weight.device, weight.dtype) != (like.device, like.dtype):
            wanted = f"weights in the target's {like.dtype} on {like.device}"
            raise refusal("drafter", wanted, f"{weight.dtype} on {weight.device}; see its .to()")
    if (device := next((weight.device for weight in shared if weight.device != like.device), None)) is not None:
        raise refusal("drafter", f"a head with an embedding and an output layer on {like.device}", device)


def call_shared(layer: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Calls a layer of the target. Raises ValueError if its weight is in shards."""
    weight = getattr(layer, "weight", None)
    if inputs.is_floating_point() and isinstance(weight, Tensor) and weight.is_floating_point():
        inputs = inputs.to(weight.dtype)  # an output layer in fp32 over a body of bf16
    try:
        return layer(inputs)
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        raise refusal("model", *SHARDED) from error
