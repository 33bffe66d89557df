"""A target of the size at which speculation matters on a CPU: the toy's, made wider, with the toy's outputs.

It stands in for the COST of a larger model, no more. Its weights are several hundred MB in bf16, so that a step of a
few rows takes the time of reading them, as in any real model. What it says, and so how many drafts are accepted, is the
toy's models' affair: a real model of this size may be easier or harder to guess.

The residual stream keeps its values in the first columns and is exactly zero in the others. New attention heads have
values of exactly zero, new neurons of the MLP gates of exactly zero; other new weights are random where only zeros meet
them. No matrix is stored or multiplied as a sparse one: each product reads all bytes, as in a trained model. Where the
width grows by 4 or 16, the compensated norms differ from the toy's by powers of two, which round nothing.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from pagedtree.generation.drafters import StepResult
from pagedtree.generation.drafters.base import FeatureRows

__all__ = ["WIDE", "for_wide", "widened"]

# 260 M parameters, 0.52 GB in bf16.
WIDE = {"hidden_size": 4096, "intermediate_size": 2048, "num_attention_heads": 64, "num_key_value_heads": 8}


def widened(model: Any, sizes: dict[str, int] | None = None, *, scale: float = 0.02, seed: int = 0) -> Any:
    """A Llama of larger sizes, on the model's device and in its dtype, whose outputs are the model's but for rounding.

    Args:
        model: LlamaForCausalLM without biases.
        sizes: the entries of its config that grow, default `WIDE`. A key-value head must serve at least as many query
            heads as before.
        scale: standard deviation of the new weights.
        seed: of the new weights.
    """
    old, new = model.config, copy.deepcopy(model.config)
    new.update(WIDE if sizes is None else sizes)
    grown = new.hidden_size / old.hidden_size
    # The mean of the squares is taken over more columns, and so is smaller.
    new.rms_norm_eps = old.rms_norm_eps / grown
    with torch.device("meta"):
        wide = LlamaForCausalLM(new)
    wide = wide.to(model.dtype).to_empty(device=model.device)
    wide.tie_weights()
    wide.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # its buffers are in no state dict
    wide.generation_config = copy.deepcopy(model.generation_config)
    random = torch.Generator(model.device).manual_seed(seed)
    query, key = _places_of_heads(old, new)
    hidden = torch.arange(old.hidden_size)
    neurons = torch.arange(old.intermediate_size)
    # New query heads of an old key-value head give values, too.
    attended = torch.arange(
        old.num_key_value_heads * (new.num_attention_heads // new.num_key_value_heads) * old.head_dim
    )
    # Module -> the places of the old model's rows and columns, and, where the other rows have to give zero, the columns
    # that carry values. The others carry zeros, so that any weight will do.
    places = {
        "embed_tokens": (torch.arange(old.vocab_size), hidden, torch.arange(new.hidden_size)),
        "q_proj": (query, hidden, None),
        "k_proj": (key, hidden, None),
        "v_proj": (key, hidden, hidden),
        "o_proj": (hidden, query, attended),
        "gate_proj": (neurons, hidden, hidden),
        "up_proj": (neurons, hidden, None),
        "down_proj": (hidden, neurons, neurons),
    }
    given = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
                weight[: old.hidden_size] = given[name] / math.sqrt(grown)
                continue
            rows, columns, carrying = places[name.split(".")[-2]]
            weight.normal_(std=scale, generator=random)
            if carrying is not None:
                weight[:, carrying] = 0
            weight[rows[:, None], columns] = given[name]
    return wide.eval()


def _places_of_heads(old: Any, new: Any) -> tuple[Tensor, Tensor]:
    """The rows of the old query heads, and of the old key-value heads, among the new ones."""
    size = old.head_dim
    before, after = (config.num_attention_heads // config.num_key_value_heads for config in (old, new))
    if after < before or new.head_dim != size:
        raise ValueError(f"sizes: expected heads of {size}, at least {before} to a key-value head, got {after}")
    heads = torch.arange(old.num_attention_heads)
    heads = heads // before * after + heads % before

    def rows(heads: Tensor) -> Tensor:
        return (heads[:, None] * size + torch.arange(size)).flatten()

    return rows(heads), rows(torch.arange(old.num_key_value_heads))


def for_wide(drafter: Any, hidden_size: int) -> Any:
    """A drafter made for the model before it was widened: it gets the first columns, which are that model's states."""
    observe, read = drafter.observe, drafter.read

    def observe_narrow(result: StepResult, rows: Tensor | None = None) -> None:
        hidden = None if result.hidden is None else result.hidden[:, :hidden_size]
        observe(replace(result, hidden=hidden), rows)

    def read_narrow(rows: FeatureRows) -> None:
        layers = rows.features.unflatten(1, (len(drafter.feature_layers), -1))
        read(replace(rows, features=layers[..., :hidden_size].flatten(1)))

    drafter.observe, drafter.read = observe_narrow, read_narrow
    drafter.check_target = lambda model: None  # its sizes are the narrow model's
    return drafter
