"""Instructions that read and write memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from ptx.formats import Array, dtype_of
from ptx.module import Fault
from ptx.state import State


class Copies(NamedTuple):
    """One cp.async, under way."""

    threads: Array  # bool [n]: those whose copy is
    groups: Array  # [n] that it belongs to
    to: Array  # [n] addresses in shared memory
    data: Array  # [n, 16]
    number: int


class Transfers(State):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.copies: list[Copies] = []
        self.open_group = np.zeros(self.n, np.int64)
        self.issued = 0
        self.nobody = np.zeros(self.n, bool)

    @staticmethod
    def _space(name: tuple[str, ...]) -> str:
        words = (part.partition("::")[0] for part in name)  # shared::cta
        return next((word for word in words if word in ("global", "shared", "param")), "generic")

    def do_ld(self, name, operands):
        vector = next((int(part[1]) for part in name if part in ("v2", "v4")), 1)
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
    do_griddepcontrol = do_membar  # here a kernel ends before the next begins

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
        if name[2] == "commit_group":
            self.open_group[self.mask] += 1
        elif name[2] == "wait_group":
            due, newest = self.mask, operands[0]  # all but the newest groups that each thread has committed
            self.deliver_copies(lambda copies: due & (copies.groups < self.open_group - newest))
        else:
            to, source = self.address(operands[0]), self.address(operands[1])
            size = np.broadcast_to(self.get(operands[3], np.uint32) if len(operands) > 3 else np.uint32(16), self.n)
            self.store("shared", to, np.full((self.n, 16), 0xFF, np.uint8))
            everyone = self.mask
            self.mask = everyone & (size == 16)
            data = self.load("global", source, 16)
            self.mask = everyone
            self.copies.append(Copies(everyone, self.open_group.copy(), to, data, self.issued))
            self.issued += 1

    def check_exit(self) -> None:
        super().check_exit()
        if self.copies:
            raise Fault("exits with cp.async in flight")

    def deliver_copies(self, threads_due: Callable[[Copies], Array]) -> None:
        left = []
        for copies in self.copies:
            due = copies.threads & threads_due(copies)
            self.shared[copies.to[due][:, None] + np.arange(16)] = copies.data[due]
            if (copies.threads & ~due).any():
                left.append(copies._replace(threads=copies.threads & ~due))
        self.copies = left
