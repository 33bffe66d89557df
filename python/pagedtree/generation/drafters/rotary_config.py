"""Rotary embeddings of draft models."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from pagedtree.generation.drafters.checkpoint_config import ConfigEntries

# Parameters of each kind. Kinds that depend on the length of the text are not supported.
KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class Rotary(NamedTuple):
    kind: str
    theta: float
    values: dict[str, float]

    @classmethod
    def of(cls, entries: ConfigEntries, kinds: Collection[str] = tuple(KINDS)) -> Rotary:
        """Reads rope_parameters, or transformers 4's rope_theta and rope_scaling. ValueError for another kind."""
        rope, scaling = entries.section("rope_parameters"), entries.section("rope_scaling")
        if rope.entries and scaling.entries:
            entries.refuse("rope_scaling", "null beside rope_parameters")
        rope = rope if rope.entries else scaling
        kind = rope.word("rope_type" if "rope_type" in rope else "type", kinds, "default")
        theta = rope.number("rope_theta", entries.number("rope_theta", 10000.0))
        values = {name: rope.number(name) for name in KINDS[kind]}
        if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
            rope.refuse("high_freq_factor", "a number above low_freq_factor")
        for section in (entries, rope):
            section.only(partial_rotary_factor=1.0)
        # In pure text the three positions of "mrope" are equal.
        rope.refuse_others(("type", "mrope_section", "mrope_interleaved"))
        return cls(kind, theta, values)

    def frequencies(self, head_dim: int) -> Tensor:
        """Returns fp32 [head_dim / 2], angles per position."""
        steps = self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.kind == "default":
            return steps
        factor = self.values["factor"]
        if self.kind == "linear":
            return steps / factor
        # Low frequencies are reduced further, as in Llama 3.1's report.
        low, high = self.values["low_freq_factor"], self.values["high_freq_factor"]
        turns = self.values["original_max_position_embeddings"] * steps / (2 * math.pi)
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return steps * (share + (1 - share) / factor)
