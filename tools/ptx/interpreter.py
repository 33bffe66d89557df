"""Executes a kernel's PTX with numpy: a register is an array with one entry per thread of the CTA.

The threads at the lowest instruction go on, which brings branches together again; a barrier waits for its threads;
whatever is asynchronous is delivered by the wait for it and no sooner. So wrong operands of inline assembly, a lost
`.trans` or `volatile` give wrong results here, which no build of the C++ sources for a CPU shows. Missing barriers do
not show.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from ptx.arithmetic import Arithmetic
from ptx.formats import Array
from ptx.mbarriers import MBarriers
from ptx.module import Fault, Instruction, Register
from ptx.warpgroups import Warpgroups
from ptx.warps import Warps

# How many threads execute an instruction together: those that come early wait for the others.
TOGETHER = {"shfl": 32, "vote": 32, "redux": 32, "ldmatrix": 32, "mma": 32, "wgmma": 128}


class Block(Arithmetic, MBarriers, Warps, Warpgroups):
    """One CTA. An instruction is the method do_<its first word>."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.at = np.zeros(self.n, np.int64)
        self.alive = np.ones(self.n, bool)
        self.barrier = np.full(self.n, -1)  # the barrier that a thread waits at
        self.arrived: Counter[int] = Counter()  # by bar.arrive, since the barrier was last complete

    def run(self) -> None:
        code, end = self.entry.code, len(self.entry.code)
        with np.errstate(all="ignore"):
            while self.alive.any():
                ready = self.alive & (self.barrier < 0) & ~self.parked
                if not ready.any():
                    if not self.deliver_one():
                        raise Fault("deadlock: not all threads reach a barrier, or an instruction of their warp")
                    continue
                at = int(self.at[ready].min())
                here = self.alive & (self.barrier < 0) & (self.at == at)
                self.parked &= ~here
                if at >= end:
                    self.alive &= ~here
                    continue
                # Until the threads part, or others could join them, they need not be looked at again.
                alone = bool((here == ready).all()) and not self.parked.any()
                at = self._run_together(code, at, here, alone, end)
                self.at[here & self.alive & (self.barrier < 0) & (self.at < 0)] = at
        self.check_exit()

    def _run_together(self, code: list[Instruction], at: int, here: Array, alone: bool, end: int) -> int:
        """Runs the threads `here` from instruction `at` on; those still marked -1 in `self.at` are at the result."""
        others = self.at[self.alive & ~here & (self.barrier < 0) & (self.at > at)]
        stop = int(others.min()) if not alone and len(others) else end
        self.at[here] = -1
        whole = bool(here.all())
        while at < end and (at < stop or alone):
            instruction = code[at]
            active, some, every = here, True, True
            if instruction.predicate is not None:
                active = here & (self.get(Register(instruction.predicate), np.bool_) ^ instruction.negated)
                some, every = bool(active.any()), bool((active == here).all())
            operation = instruction.name[0]
            early = None
            size = TOGETHER.get(operation, 32 if instruction.name[:2] == ("bar", "warp") else 1)
            if size > 1 and (not (whole and every) or self.n % size):
                early = self._incomplete(active, size)
                if early is not None:
                    active, every = active & ~early, False
                    some = bool(active.any())
                    self.parked |= early
            self.mask, self.all = active, whole and every
            if operation == "bra":
                target = self.entry.labels[instruction.operands[0].name]
                if every:
                    at = target
                    if not alone:
                        return at
                    continue
                if some:
                    self.at[here] = at + 1
                    self.at[active] = target
                    return at + 1
            elif operation in ("ret", "exit"):
                self.alive &= ~active
                if some:
                    self.at[here] = at + 1
                    return at + 1
            elif operation in ("bar", "barrier") and size == 1:
                self.at[here] = at + 1
                self._arrive(instruction, active)
                return at + 1
            elif some and operation != "bar":
                try:
                    if self.multiplications and operation != "wgmma":
                        self.check_in_flight(instruction)
                    getattr(self, "do_" + operation)(instruction.name, instruction.operands)
                except Fault as fault:
                    raise Fault(f"{fault}: {instruction.text}") from None
                except Exception as error:
                    raise Fault(f"{type(error).__name__} {error}: {instruction.text}") from error
            if operation == "mbarrier" or early is not None:  # others may be the lowest now
                self.at[here] = np.where(self.parked[here], at, at + 1)
                return at + 1
            at += 1
        return at

    def _incomplete(self, active: Array, size: int) -> Array | None:
        """Returns the active threads whose warp or warpgroup is not here as a whole, None if all are."""
        per_group = np.pad(active, (0, -self.n % size)).reshape(-1, size)
        parted = per_group.any(1) & ~per_group.all(1)
        return active & np.repeat(parted, size)[: self.n] if parted.any() else None

    def _arrive(self, instruction: Instruction, active: Array) -> None:
        kind = next(part for part in instruction.name if part in ("sync", "arrive", "red"))
        operands = instruction.operands[1:] if kind == "red" else instruction.operands
        numbers = np.broadcast_to(self.get(operands[0] if operands else 0, np.uint32), self.n).astype(np.int64)
        has_count = len(operands) > (2 if kind == "red" else 1)
        counts = np.broadcast_to(self.get(operands[1], np.uint32) if has_count else np.uint32(0), self.n)
        for number in np.unique(numbers[active]):
            own = active & (numbers == number)
            count = int(counts[own][0]) if has_count else int(self.alive.sum())
            if kind == "arrive":
                self.arrived[number] += int(own.sum())
            else:
                self.barrier[own] = number
            waiting = self.barrier == number
            if waiting.sum() + self.arrived[number] < count:
                continue
            if has_count and waiting.sum() + self.arrived[number] > count:
                raise Fault(f"more threads at a barrier than its count: {instruction.text}")
            self.barrier[waiting], self.arrived[number] = -1, 0
            if kind == "red":
                values = np.broadcast_to(self.get(operands[-1], np.bool_), self.n)[waiting]
                results = {"or": values.any(), "and": values.all(), "popc": np.uint32(values.sum())}
                result = next(results[part] for part in instruction.name if part in results)
                self.mask, self.all = waiting, bool(waiting.all())
                self.put(instruction.operands[0], result)
