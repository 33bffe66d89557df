"""Instructions by which each thread computes for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ptx.formats import UNSIGNED, Array, dtype_of, from_bfloat16, from_e4m3, halves_of, to_bfloat16
from ptx.module import Fault
from ptx.state import SHARED, State


class Arithmetic(State):
    def _apply(self, name: tuple[str, ...], operands: Any, function: Callable[..., Array]) -> None:
        dtype = dtype_of(name[-1])
        self.put(
            operands[0], np.asarray(function(*(self.get(o, dtype) for o in operands[1:]))).astype(dtype, copy=False)
        )

    def do_add(self, name, operands):
        self._apply(name, operands, lambda x, y: x + y)

    def do_sub(self, name, operands):
        self._apply(name, operands, lambda x, y: x - y)

    def do_min(self, name, operands):
        self._apply(name, operands, np.fmin)

    def do_max(self, name, operands):
        self._apply(name, operands, np.fmax)

    def do_neg(self, name, operands):
        self._apply(name, operands, lambda x: -x)

    def do_abs(self, name, operands):
        self._apply(name, operands, np.abs)

    def do_and(self, name, operands):
        self._apply(name, operands, np.bitwise_and)

    def do_or(self, name, operands):
        self._apply(name, operands, np.bitwise_or)

    def do_xor(self, name, operands):
        self._apply(name, operands, np.bitwise_xor)

    def do_not(self, name, operands):
        self._apply(name, operands, np.bitwise_not)

    def do_ex2(self, name, operands):
        self._apply(name, operands, lambda x: np.where(np.exp2(x) < np.float32(2.0**-126), 0, np.exp2(x)))  # .ftz

    def do_lg2(self, name, operands):
        self._apply(name, operands, np.log2)

    def do_rcp(self, name, operands):
        self._apply(name, operands, lambda x: np.float32(1) / x)

    def do_sqrt(self, name, operands):
        self._apply(name, operands, np.sqrt)

    def do_tanh(self, name, operands):
        self._apply(name, operands, np.tanh)

    def _apply_to_halves(self, name: tuple[str, ...], operands: Any, function: Callable[..., Array]) -> None:
        half = name[-1] == "f16x2"

        def numbers(operand: Any) -> Array:  # [2, n]
            both = halves_of(np.broadcast_to(self.get(operand, np.uint32), self.n)).T
            return (both.view(np.float16).astype(np.float32) if half else from_bfloat16(both)).astype(np.float64)

        result = function(*(numbers(o) for o in operands[1:])).astype(np.float32)
        low, high = result.astype(np.float16).view(np.uint16) if half else to_bfloat16(result)
        self.put(operands[0], high.astype(np.uint32) << np.uint32(16) | low)

    def do_mul(self, name, operands):
        if name[-1] in ("bf16x2", "f16x2"):
            return self._apply_to_halves(name, operands, lambda x, y: x * y)
        dtype = dtype_of(name[-1])
        if name[1] == "wide":
            wide = dtype_of(name[-1][0] + str(2 * np.dtype(dtype).itemsize * 8))
            x, y = (np.asarray(self.get(o, dtype)).astype(wide) for o in operands[1:])
            return self.put(operands[0], x * y)
        if name[1] == "hi":
            if np.dtype(dtype).itemsize == 8:
                raise Fault("64-bit mul.hi is not known here")
            wide = np.int64 if name[-1][0] == "s" else np.uint64
            x, y = (np.asarray(self.get(o, dtype)).astype(wide) for o in operands[1:])
            return self.put(operands[0], (x * y >> wide(32)).astype(dtype))
        self._apply(name, operands, lambda x, y: x * y)

    def do_mad(self, name, operands):
        if name[1] == "wide":
            wide = dtype_of(name[-1][0] + "64")
            x, y = (np.asarray(self.get(o, dtype_of(name[-1]))).astype(wide) for o in operands[1:3])
            return self.put(operands[0], x * y + self.get(operands[3], wide))
        self._apply(name, operands, lambda x, y, z: x * y + z)

    def do_fma(self, name, operands):
        if name[-1] in ("bf16x2", "f16x2"):
            return self._apply_to_halves(name, operands, lambda x, y, z: x * y + z)
        self._apply(name, operands, lambda x, y, z: (np.float64(x) * np.float64(y) + np.float64(z)).astype(np.float32))

    def do_div(self, name, operands):
        if name[-1][0] == "f":
            return self._apply(name, operands, lambda x, y: x / y)
        self._apply(name, operands, lambda x, y: self._divide(x, y)[0])

    def do_rem(self, name, operands):
        self._apply(name, operands, lambda x, y: self._divide(x, y)[1])

    def _divide(self, x: Array, y: Array) -> tuple[Array, Array]:
        y = np.where(self.mask & (y != 0), y, 1).astype(x.dtype)
        remainder = np.fmod(x, y)  # of the dividend's sign, as C has it
        return (x - remainder) // y, remainder

    def do_shl(self, name, operands):
        dtype = UNSIGNED[int(name[-1][1:])]
        bits = np.dtype(dtype).itemsize * 8
        x, shift = self.get(operands[1], dtype), np.asarray(self.get(operands[2], np.uint32))
        self.put(operands[0], np.where(shift < bits, x << np.minimum(shift, bits - 1).astype(dtype), 0).astype(dtype))

    def do_shr(self, name, operands):
        dtype = dtype_of(name[-1])
        bits = np.dtype(dtype).itemsize * 8
        x, shift = self.get(operands[1], dtype), np.asarray(self.get(operands[2], np.uint32))
        shifted = x >> np.minimum(shift, bits - 1).astype(dtype)
        self.put(operands[0], shifted if name[-1][0] == "s" else np.where(shift < bits, shifted, 0).astype(dtype))

    def do_prmt(self, name, operands):
        a, b, selector = (np.broadcast_to(self.get(o, np.uint32), self.n) for o in operands[1:])
        both = np.stack([a, b], 1).view(np.uint8)  # [n, 8]
        nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
        picked = np.take_along_axis(both, (nibbles & 7).astype(np.int64), 1)
        signs = np.where(picked & 0x80, 0xFF, 0).astype(np.uint8)
        self.put(operands[0], np.where(nibbles & 8, signs, picked).view(np.uint32)[:, 0])

    def do_bfi(self, name, operands):
        dtype = UNSIGNED[int(name[-1][1:])]
        insert, base = (np.broadcast_to(self.get(o, dtype), self.n) for o in operands[1:3])
        start, length = operands[3], operands[4]
        if not isinstance(start, int) or not isinstance(length, int):
            raise Fault("bfi with a variable field is not known here")
        field = dtype(((1 << length) - 1) << start)
        self.put(operands[0], base & ~field | insert << dtype(start) & field)

    def do_bfe(self, name, operands):
        start, length = operands[2], operands[3]
        if name[-1] != "u32" or not isinstance(start, int) or not isinstance(length, int):
            raise Fault("this bfe is not known here")
        self.put(operands[0], self.get(operands[1], np.uint32) >> np.uint32(start) & np.uint32((1 << length) - 1))

    def do_popc(self, name, operands):
        self.put(operands[0], np.bitwise_count(self.get(operands[1], UNSIGNED[int(name[-1][1:])])).astype(np.uint32))

    def do_clz(self, name, operands):
        bits = int(name[-1][1:])
        x = self.get(operands[1], UNSIGNED[bits])
        for distance in (1, 2, 4, 8, 16, bits // 2):  # sets every bit below the highest one
            x = x | x >> UNSIGNED[bits](distance)
        self.put(operands[0], (bits - np.bitwise_count(x)).astype(np.uint32))

    def do_setp(self, name, operands):
        dtype = dtype_of(name[-1])
        x, y = (self.get(o, dtype) for o in operands[1:3])
        comparison = name[1]
        compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                   "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
                   "hs": np.greater_equal}  # fmt: skip
        if comparison in ("nan", "num"):
            result = (np.isnan(x) | np.isnan(y)) ^ (comparison == "num")
        else:
            result = compare[comparison[:2]](x, y)
            if name[-1][0] == "f":  # np.not_equal is true of NaN, PTX's ordered ne is not
                unordered = np.isnan(x) | np.isnan(y)
                result = result | unordered if comparison.endswith("u") else result & ~unordered
        if len(name) > 3 and name[2] in ("and", "or", "xor"):
            combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[name[2]]
            result = combine(result, self.get(operands[3], np.bool_))
        self.put(operands[0], result)

    def do_selp(self, name, operands):
        dtype = dtype_of(name[-1])
        condition = self.get(operands[3], np.bool_)
        self.put(operands[0], np.where(condition, self.get(operands[1], dtype), self.get(operands[2], dtype)))

    def do_mov(self, name, operands):
        dtype = np.bool_ if name[-1] == "pred" else UNSIGNED[int(name[-1][1:])]
        to, source = operands
        if isinstance(to, list):
            value, bits = self.get(source, dtype), np.dtype(dtype).itemsize * 8 // len(to)
            for i, part in enumerate(to):
                self.put(part, (value >> dtype(i * bits)).astype(UNSIGNED[bits]))
        elif isinstance(source, list):
            bits = np.dtype(dtype).itemsize * 8 // len(source)
            parts = [np.asarray(self.get(part, UNSIGNED[bits])).astype(dtype) for part in source]
            self.put(to, np.bitwise_or.reduce([part << dtype(i * bits) for i, part in enumerate(parts)]))
        else:
            self.put(to, self.get(source, dtype))

    def do_cvta(self, name, operands):
        value = self.get(operands[1], np.uint64)
        if "shared" in name:
            value = value - np.uint64(SHARED) if name[1] == "to" else value + np.uint64(SHARED)
        self.put(operands[0], value)

    def do_cvt(self, name, operands):
        to, source = name[-2], name[-1]
        if source == "e4m3x2":
            codes = np.broadcast_to(np.asarray(self.get(operands[1], np.uint16)), self.n)
            high, low = (from_e4m3(c).astype(np.float16).view(np.uint16) for c in (codes >> 8, codes & 255))
            return self.put(operands[0], high.astype(np.uint32) << np.uint32(16) | low)
        if to in ("bf16x2", "f16x2"):
            values = (np.broadcast_to(self.get(o, np.float32), self.n) for o in operands[1:])
            high, low = (to_bfloat16(v) if to[0] == "b" else v.astype(np.float16).view(np.uint16) for v in values)
            return self.put(operands[0], high.astype(np.uint32) << np.uint32(16) | low)
        if "bf16" in (to, source):
            if to == "bf16":
                return self.put(operands[0], to_bfloat16(self.get(operands[1], np.float32)))
            return self.put(operands[0], from_bfloat16(np.asarray(self.get(operands[1], np.uint16))))
        value, dtype = np.asarray(self.get(operands[1], dtype_of(source))), dtype_of(to)
        if source[0] == "f" and to[0] in "us":
            rounding = next((r for r in name if r in ("rni", "rzi", "rmi", "rpi")), "rzi")
            value = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](value)
            info = np.iinfo(dtype)
            value = np.clip(np.nan_to_num(value.astype(np.float64)), info.min, info.max)
        self.put(operands[0], value.astype(dtype))
