"""Registers and memory of a CTA."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from ptx.formats import SIGNED, UNSIGNED, Array
from ptx.module import Address, Entry, Fault, Float, Register, Symbol

PARAM, SHARED = 1 << 60, 1 << 59  # where parameters and shared memory lie among generic addresses
SPECIAL = ("%tid.", "%ntid.", "%ctaid.", "%nctaid.", "%laneid")


class Memory:
    """This process's own memory: kernels get the addresses of the tensors themselves."""

    FIRST = 1 << 16

    def __init__(self) -> None:
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


class State:
    """What the threads of one CTA hold, and which of them execute the current instruction."""

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
        self.mask = np.ones(n, bool)  # threads that execute the current instruction
        self.all = True

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
            self.registers[operand.name] = value if value.shape else np.full(self.n, value)  # never written in place
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
