"""Loops of a compiled kernel, and the way that one iteration takes through them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sass_listing import Function, Instruction, tensor_flops

Weight = Callable[[Instruction], int]
NEVER = float("-inf")


@dataclass
class Loop:
    """Blocks by the addresses of their first instructions; `head` is where an iteration begins."""

    head: int
    body: set[int]


def branch_kind(instruction: Instruction) -> str:
    """ "jump", "either" (a condition decides), "end", or "" for what goes on to the next instruction."""
    has_condition = instruction.predicate not in ("", "PT")
    if instruction.root in ("EXIT", "RET", "KILL"):
        return "" if has_condition else "end"
    if instruction.root in ("BRA", "JMP") and instruction.target >= 0 and ".DIV" not in instruction.opcode:
        return "either" if has_condition or re.match(r"!?U?P\d", instruction.arguments) else "jump"
    # Some loops are left by a conditional call of a label that does not return.
    if instruction.root == "CALL" and has_condition and instruction.target >= 0:
        return "either"
    return ""


def tensor_and_copies(instruction: Instruction) -> int:
    """A weight: high for tensor instructions and copies, lower for loads, negative for what is only in the way."""
    if tensor_flops(instruction.opcode) or instruction.root in ("LDGSTS", "UTMALDG", "UBLKCP"):
        return 400
    if instruction.root in ("LDG", "LDSM"):
        return 40
    return -3000 if instruction.root == "CALL" and not instruction.predicate else -1


class Flow:
    """Basic blocks of a function and what follows what."""

    def __init__(self, function: Function) -> None:
        code = function.instructions
        place = {instruction.address: i for i, instruction in enumerate(code)}
        cuts = {code[0].address}
        for i, instruction in enumerate(code):
            if branch_kind(instruction):
                cuts |= {instruction.target} & place.keys()
                cuts |= {code[i + 1].address} if i + 1 < len(code) else set()
        heads = sorted(cuts)
        ends = [place[head] for head in heads[1:]] + [len(code)]
        self.blocks = {head: code[place[head] : end] for head, end in zip(heads, ends, strict=True)}
        self.next = {head: self._next(block[-1]) for head, block in self.blocks.items()}
        self.before: dict[int, set[int]] = {head: set() for head in self.blocks}
        for head, following in self.next.items():
            for other in following:
                self.before[other].add(head)

    def _next(self, last: Instruction) -> list[int]:
        kind = branch_kind(last)
        found = [] if kind in ("jump", "end") else [last.address + 16]
        found += [last.target] if kind in ("jump", "either") else []
        return [head for head in found if head in self.blocks]

    def loops(self) -> list[Loop]:
        """The loops by the addresses of their heads; loops with the same head count as one."""
        found: dict[int, Loop] = {}
        for tail, following in self.next.items():
            for head in following:
                if head <= tail and (body := self._between(head, tail)):
                    found.setdefault(head, Loop(head, set())).body.update(body)
        return [found[head] for head in sorted(found)]

    def _between(self, head: int, tail: int) -> set[int]:
        """The blocks on the ways from head to tail; empty if there is none: where the lanes of a warp have parted, a vote
        is in code behind the kernel (BRA.DIV), which jumps back."""
        body, work = {tail}, [tail]
        while work:
            at = work.pop()
            fresh = {block for block in self.before[at] if block >= head} - body if at != head else set()
            body |= fresh
            work += fresh
        return body if head in body else set()

    def path(self, loop: Loop, weight: Weight = tensor_and_copies) -> list[Instruction]:
        """One iteration: the way of the largest weight; empty where an inner loop is in every way."""
        best: dict[int, tuple[float, int | None]] = {}
        for head in sorted(loop.body, reverse=True):
            own = sum(map(weight, self.blocks[head]))
            ways: list[tuple[float, int | None]] = [(NEVER, None)]
            for following in self.next[head]:
                if following == loop.head:
                    ways.append((own, None))
                elif following in loop.body and following > head:
                    ways.append((own + best[following][0], following))
            best[head] = max(ways, key=lambda way: way[0])
        if best[loop.head][0] == NEVER:
            return []
        found: list[Instruction] = []
        at: int | None = loop.head
        while at is not None:
            found += self.blocks[at]
            at = best[at][1]
        return found

    def unrolled(self, loop: Loop, trips: Sequence[int], weight: Weight = tensor_and_copies) -> list[Instruction]:
        """path(), where a loop inside that is on the way takes trips[0] iterations, one inside of that trips[1], ...

        Raises ValueError where loops lie deeper, or less deep, than `trips` is long.
        """
        inside = {other.head: other for other in self.loops() if other.body < loop.body}
        depths = {head: sum(one.body < other.body for other in inside.values()) for head, one in inside.items()}
        way = self.path(loop, weight)
        levels = max((depths[x.address] + 1 for x in way if x.address in inside), default=0)
        if levels != len(trips):
            raise ValueError(
                f"the loop at {loop.head:#x}: expected {len(trips)} levels of loops inside, found {levels}"
            )
        found: list[Instruction] = []
        for instruction in way:
            if other := inside.get(instruction.address):
                depth = depths[other.head]
                found += self.unrolled(other, trips[depth + 1 :], weight) * (trips[depth] - 1)
            found.append(instruction)
        return found

    def main_path(self, weight: Weight = tensor_and_copies) -> list[Instruction]:
        """path() of the main loop; empty without loops."""
        loop = self.main_loop()
        return self.path(loop, weight) if loop else []

    def main_loop(self) -> Loop | None:
        """The innermost loop with the most tensor instructions, then with the most loads; None without loops."""
        ways = [(loop, path) for loop in self.loops() if (path := self.path(loop))]

        def tensor(path: Sequence[Instruction]) -> int:
            return sum(tensor_flops(instruction.opcode) > 0 for instruction in path)

        def worth(way: tuple[Loop, list[Instruction]]) -> tuple[bool, int, int, int]:
            loop, path = way
            work, loads = tensor(path), sum(x.root in ("LDG", "LDGSTS", "LD") for x in path)
            has_inner = any(
                other is not loop and other.body < loop.body and 2 * tensor(inner) >= work for other, inner in ways
            )
            return work > 0 and not has_inner, work, loads, -len(loop.body)

        return max(ways, key=worth)[0] if ways else None
