"""wgmma: four warps multiply matrices, asynchronously.

A multiplication reads its operands and writes its results at the wait for its group and no sooner. A thread that
touches the results, or writes the registers of A, before that is at fault: the PTX manual leaves undefined what it
gets. Missing wgmma.fence and fence.proxy.async do not show.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from ptx.formats import Array, from_bfloat16, halves_of
from ptx.mbarriers import swizzled_128
from ptx.module import Fault, Instruction, Register, registers_in
from ptx.state import State

THREADS = 128
ROW_OF_LANE = np.arange(THREADS) // 32 * 16 + np.arange(THREADS) % 32 // 4
COLUMN_OF_LANE = np.arange(THREADS) % 4 * 2


class Multiplication(NamedTuple):
    threads: Array  # bool [n]: those that have not waited for it yet
    groups: Array  # [n] that it belongs to
    columns: int
    bfloat16: bool
    d: list[Register]
    a: Any  # four registers, or descriptors [n]
    b: Array  # descriptors [n]
    accumulate: Array  # bool [n]
    signs: tuple[int, int]
    outer_major: tuple[int, int]  # whether A is M-major, B is N-major
    results: frozenset[str]
    inputs: frozenset[str]


def operand_addresses(descriptor: int, outer: int, outer_major: bool) -> Array:
    """Shared addresses [outer, 16] of the 16-bit elements of an operand: outer is m or n, the other axis k.

    After the canonical layouts of the PTX manual for the 128-byte swizzle. They are made of atoms of eight rows of
    128 bytes. K-major, a row holds 64 k of one m or n, and the stride offset leads to the next eight m or n; the
    leading offset is not used. Otherwise a row holds 64 m or n of one k, the leading offset leads to the next 64 m
    or n and the stride offset to the next eight k.
    """
    if descriptor >> 62 != 1 or descriptor >> 49 & 7:
        raise Fault("a descriptor without the 128-byte swizzle, or with a base offset, is not known here")
    start, leading, stride = ((descriptor >> shift & 0x3FFF) * 16 for shift in (0, 16, 32))
    o, k = np.arange(outer)[:, None], np.arange(16)[None]
    if outer_major:
        linear = o // 64 * leading + k // 8 * stride + k % 8 * 128 + o % 64 * 2
    else:
        linear = o // 8 * stride + o % 8 * 128 + k * 2
    return swizzled_128(start + linear)


class Warpgroups(State):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.multiplications: list[Multiplication] = []  # not waited for, the oldest first
        self.open_multiplications = np.zeros(self.n, np.int64)  # the number of the group that is open

    def do_setmaxnreg(self, name, operands):
        pass

    def incomplete_warpgroups(self, active: Array) -> Array:
        """Those of the active threads whose warpgroup is not here as a whole."""
        groups = np.arange(self.n) // THREADS
        return active & (np.bincount(groups[active], minlength=groups[-1] + 1)[groups] < THREADS)

    def do_wgmma(self, name, operands):
        if name[1] == "fence":
            return
        if name[1] == "commit_group":
            self.open_multiplications[self.mask] += 1
        elif name[1] == "wait_group":
            self._finish(operands[0])
        else:
            self._issue(name, operands)

    def _issue(self, name, operands):
        shape = re.fullmatch(r"m64n(\d+)k16", name[4])
        if shape is None or name[5] != "f32" or name[6] != name[7] or name[6] not in ("bf16", "f16"):
            raise Fault("this wgmma is not known here")
        d, a, b, accumulate, *modifiers = operands
        in_registers = isinstance(a, list)
        if len(modifiers) != (3 if in_registers else 4) or len(d) != int(shape[1]) // 2:
            raise Fault("wrong number of operands of wgmma")
        self.multiplications.append(
            Multiplication(
                self.mask.copy(), self.open_multiplications.copy(), int(shape[1]), name[6] == "bf16", d,
                a if in_registers else np.broadcast_to(self.get(a, np.uint64), self.n),
                np.broadcast_to(self.get(b, np.uint64), self.n),
                np.broadcast_to(self.get(accumulate, np.bool_), self.n), (modifiers[0], modifiers[1]),
                (0, modifiers[2]) if in_registers else (modifiers[2], modifiers[3]), frozenset(registers_in(d)),
                frozenset(registers_in(a) if in_registers else ()),
            )
        )  # fmt: skip

    def check_in_flight(self, instruction: Instruction) -> None:
        used, written = set(registers_in(instruction.operands)), set(registers_in(instruction.operands[:1]))
        for one in self.multiplications:
            if (used & one.results or written & one.inputs) and (one.threads & self.mask).any():
                raise Fault(f"register of a wgmma in flight: {instruction.text}")

    def check_exit(self) -> None:
        super().check_exit()
        if self.multiplications:
            raise Fault("exits with wgmma in flight")

    def _finish(self, newest: int) -> None:
        """The multiplications of all but the `newest` groups that each warpgroup has committed."""
        left, waits = [], self.mask
        for one in self.multiplications:
            due = waits & one.threads & (one.groups < self.open_multiplications - newest)
            for first in np.flatnonzero(due)[::THREADS]:
                self._multiply(one, slice(int(first), int(first) + THREADS))
            if (one.threads & ~due).any():
                left.append(one._replace(threads=one.threads & ~due))
        self.multiplications = left

    def _multiply(self, one: Multiplication, group: slice) -> None:
        def numbers(bits: Array) -> Array:
            return (from_bfloat16(bits) if one.bfloat16 else bits.view(np.float16)).astype(np.float64)

        def matrix(descriptors: Array, outer: int, outer_major: int) -> Array:  # [outer, 16]
            if (descriptors[group] != descriptors[group][0]).any():
                raise Fault("descriptors differ within a warpgroup")
            addresses = operand_addresses(int(descriptors[group][0]), outer, bool(outer_major))
            if addresses.max() + 2 > len(self.shared):
                raise Fault("wgmma reads beyond shared memory")
            return numbers(self.shared[addresses[..., None] + np.arange(2)].view(np.uint16)[..., 0])

        if isinstance(one.a, list):
            a = np.zeros((64, 16))
            for i, register in enumerate(one.a):
                pair = numbers(halves_of(self.get(register, np.uint32)[group]))
                for half in range(2):
                    a[ROW_OF_LANE + i % 2 * 8, COLUMN_OF_LANE + i // 2 * 8 + half] = pair[:, half]
        else:
            a = matrix(one.a, 64, one.outer_major[0])
        product = one.signs[0] * one.signs[1] * (a @ matrix(one.b, one.columns, one.outer_major[1]).T)
        mask = np.zeros(self.n, bool)
        mask[group] = True
        self.mask, self.all, before = mask, bool(mask.all()), (self.mask, self.all)
        for i, register in enumerate(one.d):
            values = np.zeros(self.n, np.float32)
            sums = product[ROW_OF_LANE + i // 2 % 2 * 8, COLUMN_OF_LANE + i // 4 * 8 + i % 2]
            old = np.broadcast_to(self.get(register, np.float32), self.n)[group].astype(np.float64)
            values[group] = sums + np.where(one.accumulate[group], old, 0)
            self.put(register, values)
        self.mask, self.all = before
