"""Executes a kernel's PTX with numpy: a register is an array with one entry per thread of the CTA.

The threads at the lowest instruction go on, which brings branches together again; a barrier waits for its threads;
cp.async is delivered by its wait and no sooner. So wrong operands of inline assembly, a lost `.trans` or `volatile`
give wrong results here, which no build of the C++ sources for a CPU shows. Missing barriers do not show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx.arithmetic import Arithmetic
from ptx.formats import Array
from ptx.module import Fault, Instruction, Register
from ptx.transfers import Transfers
from ptx.warps import Warps


class Block(Arithmetic, Transfers, Warps):
    """One CTA. An instruction is the method do_<its first word>."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.at = np.zeros(self.n, np.int64)
        self.alive = np.ones(self.n, bool)
        self.barrier = np.full(self.n, -1)  # the barrier that a thread waits at

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
        if self.copies:
            raise Fault("exits with cp.async in flight")

    def _run_together(self, code: list[Instruction], at: int, here: Array, alone: bool, end: int) -> int:
        """Runs the threads `here` from instruction `at` on; those still marked -1 in `self.at` are at the result."""
        others = self.at[self.alive & ~here & (self.barrier < 0)]
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
            elif operation in ("bar", "barrier"):
                self.at[here] = at + 1
                self._arrive(instruction, active)
                return at + 1
            elif some:
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
