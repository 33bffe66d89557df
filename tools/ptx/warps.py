"""Instructions that the threads of a warp execute together."""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx.formats import Array, dtype_of, from_bfloat16, halves_of
from ptx.module import Fault
from ptx.state import State


class Warps(State):
    def do_shfl(self, name, operands):
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
        values = np.broadcast_to(self.get(operands[1], np.bool_), self.n).reshape(-1, 32)
        if name[2] == "ballot":
            result = (values.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
        else:
            result = values.any(1) if name[2] == "any" else values.all(1)
        self.put(operands[0], np.repeat(result, 32))

    def do_redux(self, name, operands):
        fold = {"min": np.min, "max": np.max, "add": np.sum, "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce}
        dtype = dtype_of(name[-1])
        values = np.broadcast_to(self.get(operands[1], dtype), self.n).reshape(-1, 32)
        self.put(operands[0], np.repeat(fold[name[2]](values, axis=1).astype(dtype), 32))

    def do_ldmatrix(self, name, operands):
        rows = self.load("shared", self.address(operands[1]), 16).view(np.uint16).reshape(-1, 4, 8, 8)
        if "trans" in name:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, 4, 32)
        for i, register in enumerate(operands[0]):
            self.put(register, words[:, i].reshape(-1))

    def do_mma(self, name, operands):
        if name[3] != "m16n8k16" or name[6] != "f32":
            raise Fault("this mma is not known here")

        def halves(register: Any) -> Array:  # [warp, lane, 2]
            both = halves_of(self.get(register, np.uint32).reshape(-1, 32))
            return from_bfloat16(both) if "bf16" in name else both.view(np.float16)

        warps, pair = self.n // 32, np.arange(2)
        a, b, c = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        row, column = np.arange(32) // 4, np.arange(32) % 4 * 2
        for i, register in enumerate(operands[1]):
            a[:, row[:, None] + i % 2 * 8, column[:, None] + i // 2 * 8 + pair] = halves(register)
        for i, register in enumerate(operands[2]):
            b[:, column[:, None] + i * 8 + pair, row[:, None]] = halves(register)
        for i, register in enumerate(operands[3]):
            values = np.broadcast_to(self.get(register, np.float32), self.n).reshape(-1, 32)
            c[:, row + i // 2 * 8, column + i % 2] = values
        d = (a @ b + c).astype(np.float32)
        for i, register in enumerate(operands[0]):
            self.put(register, np.ascontiguousarray(d[:, row + i // 2 * 8, column + i % 2]).reshape(-1))
