"""The roles of warps in a kernel where some copy and others multiply by wgmma, and the ways through their loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sass_listing import Function, Instruction
from sass_loops import Flow, Loop
from sm_model import WGMMA

KEYS = 64  # for which figures hold
COPIES = {"LDGSTS", "UTMALDG", "UBLKCP"}
WGMMA_SHAPE = re.compile(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)")
Kind = Callable[[Instruction], bool]


def multiplies(x: Instruction) -> bool:
    """A product; one without a result only ends a group of them."""
    return x.root in WGMMA and not x.arguments.startswith("RZ,")


def columns_of(x: Instruction) -> int:
    """N of a wgmma, 0 of another instruction."""
    shape = WGMMA_SHAPE.match(x.opcode)
    return int(shape[2]) if shape else 0


def copies(x: Instruction) -> bool:
    """A copy to shared memory, or one half of what decodes on the way."""
    return x.root in COPIES or (x.root in ("LDG", "STS") and ".128" in x.opcode)


def masks(x: Instruction) -> bool:
    """Gives a hidden key's score no effect."""
    return "-INF" in x.arguments and x.root == "FSEL"


def waits(x: Instruction) -> bool:
    """Looks whether a phase of an mbarrier is over."""
    return x.root == "SYNCS" and "PHASECHK" in x.opcode


def inner_loops(flow: Flow, work: Kind) -> list[Loop]:
    """The loops with the most of such work on a way through them, among those without a loop inside that has some. A
    block that jumps to itself, as for the lanes that start TMA copies one after the other, is no loop here.

    Raises ValueError without one.
    """
    ways = [(loop, sum(map(work, flow.path(loop, by(work))))) for loop in flow.loops() if len(loop.body) > 1]
    having = [(loop, count) for loop, count in ways if count]
    inner = [(loop, count) for loop, count in having if not any(other.body < loop.body for other, _ in having)]
    if not inner:
        raise ValueError(f"no loop of warps where one {work.__name__}")
    most = max(count for _, count in inner)
    return [loop for loop, count in inner if count == most]


def by(work: Kind, wanted: Kind | None = None, unwanted: Kind | None = None) -> Callable[[Instruction], int]:
    """The weight of a way: all of the work, then what is wanted, nothing unwanted, a look at each mbarrier, barriers
    (groups take turns there), and few instructions."""

    def weight(x: Instruction) -> int:
        found = 100_000 * work(x) + 1000 * (wanted is not None and wanted(x)) + 30 * (waits(x) or meets(x)) - 1
        return found - 50_000 * ((unwanted is not None and unwanted(x)) or (x.root == "CALL" and not x.predicate))

    return weight


def around(flow: Flow, loop: Loop) -> Loop:
    """The next loop outwards."""
    return min((other for other in flow.loops() if other.body > loop.body), key=lambda other: len(other.body))


def shortest(
    flow: Flow, loops: Sequence[Loop], work: Kind, wanted: Kind | None = None, unwanted: Kind | None = None,
    trips: int = 1,
) -> list[Instruction]:  # fmt: skip
    """The shortest of the ways through the loops. Those inside of them on which there is work, if there are any, take
    `trips` iterations."""
    weight = by(work, wanted, unwanted)
    inside = [inner for inner in flow.loops() if len(inner.body) > 1 and any(inner.body < loop.body for loop in loops)]
    turns = {inner.head: way for inner in inside if any(map(work, way := flow.path(inner, weight)))}
    found = min((flow.path(loop, weight) for loop in loops), key=len)
    if trips == 1:
        return found
    return [x for at in found for x in [*turns.get(at.address, []) * (trips - 1), at]]


def rescales_with(path: Sequence[Instruction]) -> Kind:
    """Tells whether an instruction scales the output: a product in the registers that the last HGMMA adds to."""
    last = [x for x in path if multiplies(x)][-1]
    first = int(last.arguments[1:].split(",")[0])
    registers = {f"R{i}" for i in range(first, first + columns_of(last) // 2)}
    return lambda x: x.root == "FMUL" and x.arguments.split(",")[0] in registers


@dataclass(frozen=True)
class Role:
    """A way through a loop, which `warps` warps of a CTA take for each `keys` keys."""

    path: Sequence[Instruction]
    warps: int
    keys: int = KEYS

    @property
    def share(self) -> float:
        """What an instruction of one warp counts in the work for 64 keys."""
        return self.warps * KEYS / self.keys

    def count(self, kind: Kind) -> float:
        """Instructions of one warp for 64 keys."""
        return round(sum(map(kind, self.path)) * KEYS / self.keys, 1)


@dataclass(frozen=True)
class Roles:
    """The ways of a specialised kernel: without a mask and with one; and where the output is scaled. Where TMA copies
    what needs no mask, one warp of the producers starts it."""

    consumers: Role
    masked: Role
    rescaled: Role
    producers: tuple[Role, ...]
    masked_producers: Role

    @property
    def has_tma(self) -> bool:
        return any(x.root == "UTMALDG" for x in self.producers[0].path)


def roles_of(
    function: Function, consumers: int, producers: int, keys: int = KEYS, boxes: int = 1, trips: int = 1
) -> Roles:  # fmt: skip
    """boxes: copies by TMA for K or V of a stage, or of a part of it, if lanes start them. trips: more than 1 where a
    stage comes in so many parts, for which its loop has loops inside.

    Raises ValueError where the code has no loop with wgmma or none with copies.
    """
    flow = Flow(function)
    loops = inner_loops(flow, multiplies)
    copying = inner_loops(flow, copies)
    if trips > 1:
        loops, copying = ([around(flow, loop) for loop in inner] for inner in (loops, copying))
    way = partial(shortest, flow, trips=trips)
    plain = way(loops, multiplies)
    ways = [plain, way(loops, multiplies, masks), way(loops, multiplies, rescales_with(plain))]
    code = [x for loop in copying for head in loop.body for x in flow.blocks[head]]
    work = by_thread if any(map(by_thread, code)) else copies
    masked = Role(way(copying, work, lambda x: moves(x) or meets(x)), producers, keys)
    if any(x.root == "UTMALDG" for x in code):
        first = way(copying, lambda x: x.root == "UTMALDG", looks_up, lambda x: by_thread(x) or meets(x))
        others = shortest(
            flow, copying, lambda x: x.root == "SYNCS" and "ARRIVE" in x.opcode, looks_up,
            lambda x: copies(x) or meets(x),
        )  # fmt: skip
        turns = {head for head, following in flow.next.items() if head in following}
        repeated = [x for x in first for _ in range(boxes if in_blocks(flow, turns, x) else 1)]
        found = [Role(repeated, 1, keys)] + [Role(others, producers - 1, keys)] * (producers > 1)
    else:
        found = [Role(way(copying, by_thread, moves, meets), producers, keys)]
    return Roles(*(Role(one, consumers, keys) for one in ways), tuple(found), masked)


def by_thread(x: Instruction) -> bool:
    """A copy by each thread for itself."""
    return copies(x) and x.root != "UTMALDG"


def looks_up(x: Instruction) -> bool:
    return x.root in ("LDG", "LD")


def moves(x: Instruction) -> bool:
    """Finds what an iteration looks up and hands on to the next one."""
    return x.root in ("LDS", "STS", "LDG", "LD") and x.predicate != "!PT"


def meets(x: Instruction) -> bool:
    return x.root == "BAR"


def in_blocks(flow: Flow, heads: set[int], x: Instruction) -> bool:
    return any(flow.blocks[head][0].address <= x.address <= flow.blocks[head][-1].address for head in heads)
