"""Sampling parameters: temperature, filters and penalties."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Integral, Real

import torch
from torch import Tensor

from pagedtree._arguments import expect_type, refusal
from pagedtree._ops import makes_fakes

__all__ = ["SamplingParams"]

_INT32_MAX = 2**31 - 1
_DTYPES = {"top_k": torch.int32}  # the others are float32
_RANGES = {
    "temperature": ("a number >= 0", lambda x: x >= 0),
    "top_k": ("an integer >= -1", lambda x: x >= -1),
    "top_p": ("a number in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": ("a number in [0, 1]", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("a number > 0", lambda x: x > 0),
    "presence_penalty": ("a number in [-2, 2]", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("a number in [-2, 2]", lambda x: -2 <= x <= 2),
}
_NO_PENALTY = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class SamplingParams:
    """Temperature, filters and penalties that turn a row of logits into the sampling distribution.

    Each number is a host scalar or a tensor [B] (or [1]) on the logits' device, float32 (top_k: int32, or int64, which
    is converted), whose values may change between replays of a captured graph.

    Attributes:
        temperature: divides the logits; 0 = greedy, the lowest id of equal logits.
        top_k: keeps the k largest logits and every tie of the k-th; 0, -1 and >= V turn it off.
        top_p: keeps the fewest tokens, largest first and lower ids first on ties, whose mass is at least top_p; 1 turns
            it off.
        min_p: keeps tokens with p >= min_p * max(p); 0 turns it off.
        filter_order: "top_k_first": temperature, then min_p, then top_k, then top_p of the renormalised rest; "joint":
            each filter looks at the unfiltered distribution, and a token stays if all of them keep it.
        repetition_penalty: divides positive and multiplies negative logits of the tokens in the prompt or the output; 1
            turns it off (CTRL, Keskar et al., 2019).
        frequency_penalty, presence_penalty: subtracted from a token's logit for each of its occurrences in the output,
            and once if there is any; 0 turns them off.

    Penalties precede the temperature, in this order; `RequestOptions` holds prompt and output. Only `sample`,
    `token_logprobs` and the lossless verify ops support them; other ops raise ValueError for a penalty that is on.

    Host scalars outside temperature >= 0, top_k >= -1, 0 < top_p <= 1, 0 <= min_p <= 1, repetition_penalty > 0, and
    -2..2 for the other penalties raise ValueError, other types TypeError. Tensor values are clamped (top_p 0 keeps one
    token, a repetition_penalty <= 0 is off); NaN turns the parameter off (temperature NaN is 1).

    NaN logits read as -inf, +inf as the dtype's largest finite; a row with no finite logit is uniform over V
    (temperature 0: id 0). A top_p boundary within 1e-4 of the mass may fall either way.
    """

    temperature: float | Tensor = 1.0
    top_k: int | Tensor = 0
    top_p: float | Tensor = 1.0
    min_p: float | Tensor = 0.0
    filter_order: str = "top_k_first"
    repetition_penalty: float | Tensor = 1.0
    presence_penalty: float | Tensor = 0.0
    frequency_penalty: float | Tensor = 0.0

    def __post_init__(self) -> None:
        for name, (expected, inside) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) or (type(value) is type(_DEFAULTS[name]) and value == _DEFAULTS[name]):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral if name == "top_k" else Real):
                raise refusal(name, f"{expected} or a tensor", repr(value), TypeError)
            if not inside(value):
                raise refusal(name, expected, value)
        expect_type("filter_order", self.filter_order, str)
        if self.filter_order not in ("top_k_first", "joint"):
            raise refusal("filter_order", '"top_k_first" or "joint"', repr(self.filter_order))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, str]:
        """Returns (temperature, top_k, top_p, min_p, filter_order) as raw ops take them, tensors [1] or [B]."""
        keep = _may_keep(device)
        return (
            _on_device(self.temperature, "temperature", device, keep),
            _on_device(self.top_k, "top_k", device, keep),
            _on_device(self.top_p, "top_p", device, keep),
            _on_device(self.min_p, "min_p", device, keep),
            self.filter_order,
        )

    def penalties_on(self, device: torch.device) -> dict[str, Tensor | None]:
        """Returns the penalties as the raw ops take them, by name: tensors of shape [1] or [B]; None is off."""
        tensors: dict[str, Tensor | None] = {}
        keep: bool | None = None
        for name, neutral in _NO_PENALTY.items():
            value = getattr(self, name)
            if not isinstance(value, Tensor) and value == neutral:
                tensors[name] = None
            else:
                keep = _may_keep(device) if keep is None else keep
                tensors[name] = _on_device(value, name, device, keep)
        return tensors

    def expect_no_penalty(self, argument: str = "params") -> None:
        for name, neutral in _NO_PENALTY.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) or value != neutral:
                text = "a tensor" if isinstance(value, Tensor) else value
                raise refusal(argument, f"{name} {neutral}", text)


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def _may_keep(device: torch.device) -> bool:
    """Returns whether a new tensor may be cached: tensors of a capture or a trace do not outlive it."""
    is_traced = torch.compiler.is_compiling() or makes_fakes()
    return not is_traced and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _on_device(value: float | Tensor, name: str, device: torch.device, keep: bool) -> Tensor:
    if isinstance(value, Tensor):
        if name == "top_k" and value.dtype == torch.int64:
            value = value.clamp(-1, _INT32_MAX).int()
        return value.reshape(1) if value.dim() == 0 else value
    number = min(int(value), _INT32_MAX) if name == "top_k" else _float32(value)
    dtype = _DTYPES.get(name, torch.float32)
    return _constant(number, dtype, device) if keep else torch.full((1,), number, dtype=dtype, device=device)


def _float32(value: float) -> float:
    return float(value) if value <= _LARGEST_FLOAT32 else math.inf


@lru_cache(maxsize=1024)
def _constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), number, dtype=dtype, device=device)
