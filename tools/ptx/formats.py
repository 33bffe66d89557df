"""The types of PTX as numpy has them: a register is an array with one entry per thread of the CTA."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # np.ndarray, or a scalar of the same dtype

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
KINDS = {"u": UNSIGNED, "b": UNSIGNED, "s": SIGNED, "f": FLOAT}


def dtype_of(suffix: str) -> Any:
    return np.bool_ if suffix == "pred" else KINDS[suffix[0]][int(suffix[1:])]


def halves_of(words: Array) -> Array:
    """uint32 [...] -> uint16 [..., 2], the lower half first."""
    return np.ascontiguousarray(words)[..., None].view(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_e4m3(codes: Array) -> Array:
    exponent, mantissa = codes.astype(np.int32) >> 3 & 15, codes.astype(np.int32) & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude = np.where(codes & 127 == 127, np.nan, magnitude)
    return np.where(codes & 128, -magnitude, magnitude)


def to_bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)
