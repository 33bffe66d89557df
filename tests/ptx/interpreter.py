"""Executes a kernel's PTX with numpy: a register is an array with one entry a thread of the CTA.

Of all threads, those at the lowest instruction go on, which brings branches together again; a barrier waits for its
threads; cp.async is delivered by its wait and no sooner. So wrong operands of inline assembly, a lost `.trans` or
`volatile` give wrong results here, which no build of the C++ sources for a CPU shows. Missing barriers do not show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from ptx.module import Address, Entry, Fault, Float, Instruction, Register, Symbol

Array = Any  # np.ndarray, or a scalar of the same dtype

PARAM, SHARED = 1 << 60, 1 << 59  # where parameters and shared memory lie among generic addresses
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
KINDS = {"u": UNSIGNED, "b": UNSIGNED, "s": SIGNED, "f": FLOAT}
SPECIAL = ("%tid.", "%ntid.", "%ctaid.", "%nctaid.", "%laneid")


def dtype_of(suffix: str) -> Any:
    return np.bool_ if suffix == "pred" else KINDS[suffix[0]][int(suffix[1:])]


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


class Memory:
    """This process's own memory: kernels get the addresses of the tensors themselves."""

    FIRST = 1 << 16

    def __init__(self) -> None:
        import ctypes

        size = (1 << 47) - 2 * self.FIRST
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(self.FIRST), np.uint8)
        ranges = []
        with open("/proc/self/maps") as maps:
            for line in maps:
                bounds, rights = line.split()[:2]
                low, high = (int(bound, 16) for bound in bounds.split("-"))
                if rights.startswith("rw"):
                    ranges.append((low, high))
        merged: list[list[int]] = []
        for low, high in sorted(ranges):
            if merged and merged[-1][1] == low:
                merged[-1][1] = high
            else:
                merged.append([low, high])
        self.low, self.high = (np.array(bounds, np.int64) for bounds in zip(*merged, strict=True))

    def index(self, addresses: Array, size: int) -> Array:
        found = np.searchsorted(self.low, addresses, "right") - 1
        if (found < 0).any() or (addresses + size > self.high[found]).any():
            raise Fault("global access out of bounds")
        return addresses - self.FIRST


class Block:
    """One CTA."""

    def __init__(
        self,
        entry: Entry,
        params: bytes,
        memory: Memory,
        index: tuple[int, int, int],
        threads: tuple[int, int, int],
        grid: tuple[int, int, int],
        shared_bytes: int,
    ) -> None:
        self.entry, self.memory = entry, memory
        self.n = n = threads[0] * threads[1] * threads[2]
        self.params = np.frombuffer(params + bytes(16), np.uint8)
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.registers: dict[str, Array] = {}
        ids = np.arange(n, dtype=np.uint32)
        own = (ids % threads[0], ids // threads[0] % threads[1], ids // (threads[0] * threads[1]))
        self.lane = ids % 32
        self.special: dict[str, Array] = {"%laneid": self.lane}
        for axis, letter in enumerate("xyz"):
            self.special["%tid." + letter] = own[axis].astype(np.uint32)
            self.special["%ntid." + letter] = np.uint32(threads[axis])
            self.special["%ctaid." + letter] = np.uint32(index[axis])
            self.special["%nctaid." + letter] = np.uint32(grid[axis])
        self.at = np.zeros(n, np.int64)
        self.alive = np.ones(n, bool)
        self.barrier = np.full(n, -1)  # the barrier that a thread waits at
        self.mask = np.ones(n, bool)  # threads that execute the current instruction
        self.all = True
        self.open_copies: list[list[tuple[int, Array]]] = [[] for _ in range(n)]
        self.copy_groups: list[list[list[tuple[int, Array]]]] = [[] for _ in range(n)]

    # ---- operands

    def get(self, operand: Any, dtype: Any) -> Array:
        if isinstance(operand, Register):
            if operand.name.startswith(SPECIAL):
                value = self.special[operand.name]
            else:
                value = self.registers.get(operand.name)
                if value is None:
                    width = self.entry.width(operand.name)
                    value = np.zeros(self.n, np.bool_ if width == 1 else UNSIGNED[width])
        elif isinstance(operand, int):
            bits = np.dtype(dtype).itemsize * 8
            value = UNSIGNED[bits](operand & (1 << bits) - 1) if dtype is not np.bool_ else np.bool_(operand)
        elif isinstance(operand, Float):
            value = UNSIGNED[operand.width](operand.bits)
        elif isinstance(operand, Symbol):  # a parameter, or the dynamic shared memory, which begins at 0
            value = np.uint64(PARAM + self.entry.params[operand.name] if operand.name in self.entry.params else 0)
        else:
            raise Fault(f"operand {operand}")
        if value.dtype == dtype:
            return value
        if value.dtype.itemsize != np.dtype(dtype).itemsize:
            value = value.astype(UNSIGNED[np.dtype(dtype).itemsize * 8])
        return value.view(dtype)

    def put(self, operand: Any, value: Array) -> None:
        if not isinstance(operand, Register) or operand.name == "_":
            return
        width = self.entry.width(operand.name)
        value = np.asarray(value)
        if width == 1:
            value = value.astype(np.bool_)
        elif value.dtype.itemsize * 8 == width:
            value = value.view(UNSIGNED[width])
        else:
            value = value.astype(SIGNED[width] if value.dtype.kind == "i" else UNSIGNED[width]).view(UNSIGNED[width])
        old = self.registers.get(operand.name)
        if self.all or old is None:
            self.registers[operand.name] = np.broadcast_to(value, self.n).copy()
        else:
            self.registers[operand.name] = np.where(self.mask, value, old)

    def address(self, operand: Address) -> Array:
        base = np.broadcast_to(self.get(operand.base, np.uint64), self.n)
        return base.astype(np.int64) + operand.offset

    def _place(self, space: str, addresses: Array, size: int) -> tuple[Array, Array]:
        used = addresses[self.mask]
        if space == "param" or (space == "generic" and (used >= PARAM).all()):
            memory, start = self.params, PARAM
        elif space == "shared" or (space == "generic" and (used >= SHARED).all()):
            memory, start = self.shared, SHARED if space == "generic" else 0
        else:
            return self.memory.bytes, self.memory.index(used, size)
        if (used < start).any() or (used + size > start + len(memory)).any():
            raise Fault(f"{space} access out of bounds")
        return memory, used - start

    def load(self, space: str, addresses: Array, size: int) -> Array:
        """Bytes [n, size]; zeros of threads that do not take part."""
        if (addresses[self.mask] % min(size, 16)).any():
            raise Fault("misaligned access")
        memory, index = self._place(space, addresses, size)
        data = np.zeros((self.n, size), np.uint8)
        data[self.mask] = memory[index[:, None] + np.arange(size)]
        return data

    def store(self, space: str, addresses: Array, data: Array) -> None:
        if (addresses[self.mask] % min(data.shape[1], 16)).any():
            raise Fault("misaligned access")
        memory, index = self._place(space, addresses, data.shape[1])
        memory[index[:, None] + np.arange(data.shape[1])] = data[self.mask]

    # ---- control

    def run(self) -> None:
        code, end = self.entry.code, len(self.entry.code)
        with np.errstate(all="ignore"):
            while self.alive.any():
                ready = self.alive & (self.barrier < 0)
                if not ready.any():
                    raise Fault("deadlock: not all threads reach a barrier")
                at = int(self.at[ready].min())
                here = ready & (self.at == at)
                if at >= end:
                    self.alive &= ~here
                    continue
                # Until the threads part, or others could join them, they need not be looked at again.
                alone = bool((here == ready).all())
                at = self._run_together(code, at, here, alone, end)
                self.at[here & self.alive & (self.barrier < 0) & (self.at < 0)] = at
        if any(self.open_copies) or any(group for groups in self.copy_groups for group in groups):
            raise Fault("exits with cp.async in flight")

    def _run_together(self, code: list[Instruction], at: int, here: Array, alone: bool, end: int) -> int:
        """Runs the threads `here` from instruction `at` on; those still marked -1 in `self.at` are at the result."""
        others = self.at[self.alive & ~here & (self.barrier < 0)]
        stop = int(others.min()) if not alone and len(others) else end
        self.at[here] = -1
        while at < end and (at < stop or alone):
            instruction = code[at]
            active = here
            if instruction.predicate is not None:
                active = here & (self.get(Register(instruction.predicate), np.bool_) ^ instruction.negated)
            operation = instruction.name[0]
            self.mask, self.all = active, bool(active.all())
            if operation == "bra":
                target = self.entry.labels[instruction.operands[0].name]
                if (active == here).all():
                    at = target
                    if not alone:
                        return at
                    continue
                if active.any():
                    self.at[here] = at + 1
                    self.at[active] = target
                    return at + 1
            elif operation in ("ret", "exit"):
                self.alive &= ~active
                if active.any():
                    self.at[here] = at + 1
                    return at + 1
            elif operation in ("bar", "barrier"):
                self.at[here] = at + 1
                self._arrive(instruction, active)
                return at + 1
            elif active.any():
                try:
                    getattr(self, "do_" + operation)(instruction.name, instruction.operands)
                except Fault as fault:
                    raise Fault(f"{fault}: {instruction.text}") from None
                except Exception as error:
                    raise Fault(f"{type(error).__name__} {error}: {instruction.text}") from error
            at += 1
        return at

    def _arrive(self, instruction: Instruction, active: Array) -> None:
        reduces = instruction.name[1] == "red"
        operands = instruction.operands[1:] if reduces else instruction.operands
        number = operands[0] if operands and isinstance(operands[0], int) else 0
        if operands and isinstance(operands[0], Register):
            number = int(np.broadcast_to(self.get(operands[0], np.uint32), self.n)[active][0])
        count = int(self.alive.sum())
        if not reduces and len(operands) > 1:
            count = int(np.broadcast_to(self.get(operands[1], np.uint32), self.n)[active][0])
        self.barrier[active] = number
        waiting = self.barrier == number
        if waiting.sum() < count:
            return
        self.barrier[waiting] = -1
        if reduces:
            values = np.broadcast_to(self.get(operands[-1], np.bool_), self.n)[waiting]
            result = {"or": values.any(), "and": values.all(), "popc": np.uint32(values.sum())}[instruction.name[2]]
            self.mask, self.all = waiting, bool(waiting.all())
            self.put(instruction.operands[0], result)

    # ---- arithmetic

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
        self._apply(name, operands, np.exp2)

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
            bits = np.broadcast_to(self.get(operand, np.uint32), self.n)
            both = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)]).astype(np.uint16)
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
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(self.n, np.uint32)
        for i in range(4):
            pick = selector >> np.uint32(4 * i) & np.uint32(15)
            byte = both >> (np.uint64(8) * (pick & np.uint32(7)).astype(np.uint64)) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            result |= np.where(pick & 8, sign, byte).astype(np.uint32) << np.uint32(8 * i)
        self.put(operands[0], result)

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

    # ---- memory

    @staticmethod
    def _space(name: tuple[str, ...]) -> str:
        return next((part for part in name if part in ("global", "shared", "param")), "generic")

    def do_ld(self, name, operands):
        vector = next((int(part[1]) for part in name if re.fullmatch(r"v\d", part)), 1)
        dtype = dtype_of(name[-1])
        size = np.dtype(dtype).itemsize
        data = self.load(self._space(name), self.address(operands[1]), vector * size)
        for i, register in enumerate(operands[0] if isinstance(operands[0], list) else [operands[0]]):
            self.put(register, np.ascontiguousarray(data[:, i * size : (i + 1) * size]).view(dtype)[:, 0])

    def do_st(self, name, operands):
        dtype = dtype_of(name[-1])
        values = operands[1] if isinstance(operands[1], list) else [operands[1]]
        columns = [np.broadcast_to(self.get(value, dtype), self.n) for value in values]
        data = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8).reshape(self.n, -1)
        self.store(self._space(name), self.address(operands[0]), data)

    def do_membar(self, name, operands):
        pass

    do_fence = do_membar

    def do_atom(self, name, operands):
        operation, dtype = next(p for p in name if p in ("inc", "add", "max", "min", "exch", "cas")), dtype_of(name[-1])
        size, addresses, old = np.dtype(dtype).itemsize, self.address(operands[1]), np.zeros(self.n, dtype)
        arguments = [np.broadcast_to(self.get(o, dtype), self.n) for o in operands[2:]]
        everyone = self.mask
        for thread in np.flatnonzero(everyone):  # one after the other
            self.mask = np.zeros(self.n, bool)
            self.mask[thread] = True
            value = self.load(self._space(name), addresses, size)[thread].view(dtype)[0]
            x = arguments[0][thread]
            new = {
                "inc": lambda v=value, x=x: dtype(0) if v >= x else v + dtype(1),
                "add": lambda v=value, x=x: v + x,
                "max": lambda v=value, x=x: max(v, x),
                "min": lambda v=value, x=x: min(v, x),
                "exch": lambda x=x: x,
                "cas": lambda v=value, x=x, t=thread: arguments[1][t] if v == x else v,
            }[operation]()
            old[thread] = value
            self.store(self._space(name), addresses, np.full((self.n, 1), new, dtype).view(np.uint8))
        self.mask = everyone
        self.put(operands[0], old)

    def do_cp(self, name, operands):
        threads = np.flatnonzero(self.mask)
        if name[2] == "commit_group":
            for t in threads:
                self.copy_groups[t].append(self.open_copies[t])
                self.open_copies[t] = []
        elif name[2] == "wait_group":
            for t in threads:
                while len(self.copy_groups[t]) > operands[0]:
                    for to, data in self.copy_groups[t].pop(0):
                        self.shared[to : to + 16] = data
        else:
            to, source = self.address(operands[0]), self.address(operands[1])
            size = np.broadcast_to(self.get(operands[3], np.uint32) if len(operands) > 3 else np.uint32(16), self.n)
            self.store("shared", to, np.full((self.n, 16), 0xFF, np.uint8))
            everyone = self.mask
            self.mask = everyone & (size == 16)
            data = self.load("global", source, 16)
            self.mask = everyone
            for t in threads:
                self.open_copies[t].append((int(to[t]), data[t]))

    # ---- warps

    def _whole_warps(self) -> None:
        per_warp = self.mask.reshape(-1, 32)
        if (per_warp.any(1) != per_warp.all(1)).any():
            raise Fault("a diverged warp")

    def do_shfl(self, name, operands):
        self._whole_warps()
        lane, by = (
            self.lane.astype(np.int64),
            np.broadcast_to(self.get(operands[2], np.uint32), self.n).astype(np.int64),
        )
        clamp = np.broadcast_to(self.get(operands[3], np.uint32), self.n).astype(np.int64)
        segment = clamp >> 8 & 31
        first, last = lane & segment, lane & segment | clamp & 31 & ~segment
        source = {"bfly": lane ^ by, "idx": first | by & 31 & ~segment, "down": lane + by, "up": lane - by}[name[2]]
        inside = source >= (first if name[2] != "up" else lane & segment) if name[2] == "up" else source <= last
        source = np.where(inside, source, lane)
        to = operands[0] if isinstance(operands[0], list) else [operands[0]]
        value = np.broadcast_to(self.get(operands[1], np.uint32), self.n)
        self.put(to[0], value[np.arange(self.n) // 32 * 32 + source])
        if len(to) > 1:
            self.put(to[1], inside)

    def do_vote(self, name, operands):
        self._whole_warps()
        values = np.broadcast_to(self.get(operands[1], np.bool_), self.n).reshape(-1, 32)
        if name[2] == "ballot":
            result = (values.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        else:
            result = values.any(1) if name[2] == "any" else values.all(1)
        self.put(operands[0], np.repeat(result, 32))

    def do_redux(self, name, operands):
        self._whole_warps()
        fold = {"min": np.min, "max": np.max, "add": np.sum, "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce}
        dtype = dtype_of(name[-1])
        values = np.broadcast_to(self.get(operands[1], dtype), self.n).reshape(-1, 32)
        self.put(operands[0], np.repeat(fold[name[2]](values, axis=1).astype(dtype), 32))

    def do_ldmatrix(self, name, operands):
        self._whole_warps()
        rows = self.load("shared", self.address(operands[1]), 16).view(np.uint16).reshape(-1, 4, 8, 8)
        if "trans" in name:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, 4, 32)
        for i, register in enumerate(operands[0]):
            self.put(register, words[:, i].reshape(-1))

    def do_mma(self, name, operands):
        self._whole_warps()
        if name[3] != "m16n8k16" or name[6] != "f32":
            raise Fault("this mma is not known here")

        def halves(register: Any) -> Array:  # [warp, lane, 2]
            words = self.get(register, np.uint32).reshape(-1, 32)
            both = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], -1).astype(np.uint16)
            return from_bfloat16(both) if "bf16" in name else both.view(np.float16).astype(np.float32)

        warps = self.n // 32
        a, b, c = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        row, column = np.arange(32) // 4, np.arange(32) % 4 * 2
        for i, register in enumerate(operands[1]):
            for e in range(2):
                a[:, row + i % 2 * 8, column + i // 2 * 8 + e] = halves(register)[:, :, e]
        for i, register in enumerate(operands[2]):
            for e in range(2):
                b[:, column + i * 8 + e, row] = halves(register)[:, :, e]
        for i, register in enumerate(operands[3]):
            values = np.broadcast_to(self.get(register, np.float32), self.n).reshape(-1, 32)
            c[:, row + i // 2 * 8, column + i % 2] = values
        d = (a @ b + c).astype(np.float32)
        for i, register in enumerate(operands[0]):
            self.put(register, np.ascontiguousarray(d[:, row + i // 2 * 8, column + i % 2]).reshape(-1))
