"""What whole calls of ops other than attention cost, in the same model: what a CTA does, one phase after the other.

A call is a list of launches. A launch has CTAs, of which as many share a multiprocessor as registers and shared memory
allow, and the phases of a CTA: turns of loops of the machine code, which the simulator times, and what is only
reckoned: dependent loads, barriers, cycles of serial code. Its time is that of its phases in as many waves as the CTAs
need, or that of the bytes that come from memory or go there, whichever is longer. All of it is predicted.

To describe an op write a function that takes `Kernels` and returns the launches of a call, and one `OpCall` for each
call into the CALLS of the file of its family (calls_of_*.py); `FAMILIES` below lists these files. A kernel is found by
parts of its mangled name, a loop in it by the instructions that it has:

    kernel = kernels("expand_top_kernel", "DTypeE2")  # of bf16
    rows = kernel.loop(own={"LDG.E.128": 4}, whole={"ATOMS": 1})
    Phase("count", kernel.turn(rows, likes={"LDG.E.128": 12}, into={"ATOMS": (4, 2)}), turns=8, source="memory")

`python -m pagedtree bench predict --ops calls --loops expand_top_kernel DTypeE2` lists a kernel's loops with what is
in them, `--ops calls --instances "ngram_propose"` predicts the calls whose names contain that. Both take `--source
csrc/cuda/drafting/growth.cu`, which compiles some files instead of taking the library: all that the calls launch.
`--json` records the rows, and keeps those of other calls; then `python docs/make_performance.py` writes the table.
tests/kernels/test_predict_ops.py holds the kernels against the rows: when a kernel has other loops, its description has
to follow.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from predict_calls import AROUND_A_LOAD, DEPENDENT_GAP_US, L1_LATENCY
from predict_loop import ctas_that_fit, registers_of
from sass_listing import Function, Instruction, disassemble, symbols_of
from sass_loops import Flow, Loop
from sm_model import Machine
from sm_simulator import predict

FAMILIES = ("calls_of_drafting", "calls_of_logits", "calls_of_recurrent", "calls_of_trees", "calls_of_verify")

# ---- assumptions that attention's calls do not need

# From the end of a kernel to the first instruction of the next one in a graph, where it is not launched early.
# Reckoned: NVIDIA states none.
GAP_US = 1.0
# Cycles of a barrier of a CTA with what its warps wait for each other; of one of a cluster, which is a way to other
# multiprocessors and back (180 cycles each way: Luo et al., Dissecting the NVIDIA Hopper Architecture, 2025).
BARRIER, MEETING = 40, 400
SM_THREADS, SM_CTAS = 2048, 32  # that a multiprocessor holds


@dataclass(frozen=True)
class Phase:
    """What each warp of a CTA does.

    Attributes:
        path: the instructions of one turn of a loop. turns: of a warp; the mean where warps share them.
        warps: that take turns beside each other; 0: all of the CTA. source: where words of 16 bytes come from, "memory"
            or "l2".
        far, loads, near: dependent loads from memory, from L2, and from L1 or shared memory.
        barriers, meetings: of the CTA, of the cluster. cycles: what is reckoned besides.
        passes: of an atomic addition to shared memory, where they are not those of radix columns.
    """

    name: str
    path: Sequence[Instruction] = ()
    turns: float = 0.0
    warps: int = 0
    source: str = "l2"
    far: float = 0
    loads: float = 0
    near: float = 0
    barriers: float = 0
    meetings: float = 0
    cycles: float = 0
    passes: float = 0

    def of_cta(self, machine: Machine, warps: int, ctas: int) -> float:
        """Cycles, where `ctas` CTAs of so many warps share a multiprocessor."""
        cycles = self.cycles + self.barriers * BARRIER + self.meetings * MEETING
        cycles += self.far * (machine.memory_latency + AROUND_A_LOAD)
        cycles += self.loads * (machine.l2_latency + AROUND_A_LOAD) + self.near * (L1_LATENCY + AROUND_A_LOAD)
        if self.passes:
            machine = replace(machine, atomic_passes=self.passes)
        if self.path:
            cycles += self.turns * turn_cycles(machine, tuple(self.path), self.warps or warps, ctas, self.source)
        return cycles


@cache
def turn_cycles(machine: Machine, path: tuple[Instruction, ...], warps: int, ctas: int, source: str) -> float:
    return predict(machine, path, warps=warps, ctas=ctas, source=source).cycles


class Kernel:
    """The machine code of a kernel."""

    def __init__(self, function: Function) -> None:
        self.function, self.name = function, function.name
        self.flow, self.registers = Flow(function), registers_of(function)
        self.loops = self.flow.loops()
        found = re.search(r"\d([a-z_]+_kernel)", self.name)
        self.short_name = found[1] if found else self.name

    def inside(self, loop: Loop) -> list[Loop]:
        return [other for other in self.loops if other.body < loop.body]

    def own(self, loop: Loop) -> Counter[str]:
        """Opcodes of the loop without those of loops inside."""
        blocks = loop.body - set[int]().union(*(other.body for other in self.inside(loop)))
        return Counter(x.opcode for block in blocks for x in self.flow.blocks[block])

    def whole(self, loop: Loop) -> Counter[str]:
        return Counter(x.opcode for block in loop.body for x in self.flow.blocks[block])

    def loop(
        self,
        own: Mapping[str, int] | None = None,
        whole: Mapping[str, int] | None = None,
        lacks: Iterable[str] = (),
        number: int = 0,
    ) -> Loop:
        """Loop `number`, by address (-1: the last one), of those that have so many opcodes of each beginning,
        themselves or with the loops inside, and none that begins as one of `lacks`. Raises ValueError where there is
        none."""

        def count(opcodes: Counter[str], begin: str) -> int:
            return sum(number for opcode, number in opcodes.items() if opcode.startswith(begin))

        found = [
            loop
            for loop in self.loops
            if all(count(self.own(loop), begin) >= least for begin, least in (own or {}).items())
            and all(count(self.whole(loop), begin) >= least for begin, least in (whole or {}).items())
            and not any(count(self.whole(loop), begin) for begin in lacks)
        ]
        if not -len(found) <= number < len(found):
            raise ValueError(f"{self.name} has {len(found)} loops with {own or whole}, none of number {number}")
        return found[number]

    def turn(
        self, loop: Loop, likes: Mapping[str, float] | None = None, into: Mapping[str, Sequence[int]] | None = None
    ) -> list[Instruction]:
        """One turn: the shortest way but for instructions that it likes, or avoids (below 0), by the beginnings of
        their opcodes. {"ATOMS": (4, 2)}: a loop inside that has ATOMS, by itself or within, takes four turns, such a
        loop in there two; the first beginning that a loop has decides, and () is not to enter it. Raises ValueError
        where loops inside that are not named cannot be avoided."""
        turns = dict[int, int]()
        for other in self.inside(loop):
            depth = sum(other.body < outer.body for outer in self.inside(loop))
            opcodes = self.whole(other)
            has = (numbers for begin, numbers in (into or {}).items() if any(x.startswith(begin) for x in opcodes))
            numbers = next(has, ())
            if depth < len(numbers):
                turns[other.head] = numbers[depth]
        heads = {other.head: other for other in self.inside(loop)}

        def weight(x: Instruction) -> float:
            liked = next((worth for begin, worth in (likes or {}).items() if x.opcode.startswith(begin)), -1)
            return liked + 100 * (x.address in turns) - 9000 * (x.address in heads and x.address not in turns)

        def unrolled(outer: Loop) -> list[Instruction]:
            found: list[Instruction] = []
            for x in self.flow.path(outer, weight):
                if x.address in heads and x.address != outer.head:
                    if x.address not in turns:
                        raise ValueError(
                            f"{self.name}: the loop at {x.address:#x} is on the way through {outer.head:#x}"
                        )
                    found += unrolled(heads[x.address]) * (turns[x.address] - 1)
                found.append(x)
            return found

        return unrolled(loop)

    def listing(self) -> str:
        """The loops, those inside indented: address, the instructions of the whole and of the shortest way, opcodes."""
        lines = [f"{self.name}: {self.registers} registers"]
        for loop in self.loops:
            outer = sum(loop.body < other.body for other in self.loops)
            own = self.own(loop)
            roots = Counter[str]()
            for opcode, number in own.items():
                roots[opcode if opcode.startswith(("LD", "ST", "ATOM", "RED")) else opcode.split(".")[0]] += number
            way = len(self.flow.path(loop, lambda x: -1))
            most = ", ".join(f"{root} {number}" for root, number in roots.most_common())
            lines.append(f"{'  ' * outer}{loop.head:#x}: {sum(own.values())} own, way of {way}: {most}")
        return "\n".join(lines)


class Kernels:
    """The kernels of some cubins, by parts of their mangled names."""

    def __init__(self, cubins: Iterable[Path]) -> None:
        self.symbols = {name: cubin for cubin in cubins for name in symbols_of(cubin) if name.startswith("_Z")}
        self.known: dict[str, Kernel] = {}

    def __call__(self, *parts: str) -> Kernel:
        """Raises LookupError where not exactly one kernel has all of them in its name."""
        found = [name for name in self.symbols if all(part in name for part in parts)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} kernels have {', '.join(parts)} in their names, expected one")
        (name,) = found
        if name not in self.known:
            (function,) = disassemble(self.symbols[name], lambda symbol: symbol == name)
            self.known[name] = Kernel(function)
        return self.known[name]


@dataclass(frozen=True)
class Launch:
    """ctas: of the grid. threads: of a CTA. moved: bytes that come from memory or go there. early: it begins while the
    kernel before it ends (programmatic dependent launch)."""

    kernel: Kernel
    ctas: int
    threads: int
    phases: Sequence[Phase]
    shared_bytes: int = 0
    moved: float = 0.0
    early: bool = False

    def row(self, machine: Machine) -> dict[str, Any]:
        fit = ctas_that_fit(machine, self.threads, self.kernel.registers, self.shared_bytes)
        fit = min(fit, SM_THREADS // self.threads, SM_CTAS)
        beside = min(fit, math.ceil(self.ctas / machine.multiprocessors))
        waves = math.ceil(self.ctas / machine.multiprocessors / beside)
        # Fewer multiprocessors have more of the memory's bandwidth each.
        shared = replace(machine, multiprocessors=min(machine.multiprocessors, self.ctas))
        parts = {phase.name: phase.of_cta(shared, self.threads // 32, beside) for phase in self.phases}
        chain = waves * sum(parts.values()) / machine.ghz / 1e3
        # Few multiprocessors get no more than L2 gives each.
        memory = self.moved / shared.bytes_per_cycle("memory") / shared.multiprocessors / machine.ghz / 1e3
        return {
            "kernel": self.kernel.short_name,
            "ctas": self.ctas,
            "beside": beside,
            "waves": waves,
            "registers": self.kernel.registers,
            "us": round(max(chain, memory), 2),
            "memory_us": round(memory, 2),
            "cycles": {name: round(cycles) for name, cycles in parts.items()},
            "gap_us": DEPENDENT_GAP_US if self.early else GAP_US,
        }


@dataclass(frozen=True)
class OpCall:
    """launches: those of the call. moved: bytes that it has to read or to write, each once."""

    name: str
    launches: Callable[[Kernels], list[Launch]]
    moved: float

    def row(self, machine: Machine, kernels: Kernels) -> dict[str, Any]:
        launches = [launch.row(machine) for launch in self.launches(kernels)]
        us = sum(launch["us"] + launch["gap_us"] for launch in launches)
        floor = self.moved / bytes_per_us(machine)
        row = {"machine": machine.name, "call": self.name, "us": round(us, 2), "floor_us": round(floor, 3)}
        return row | {"ratio": round(us / floor, 2), "launches": launches}


def bytes_per_us(machine: Machine) -> float:
    """What a good copy reaches."""
    return machine.memory_gb_per_s * machine.read_share * 1e3


def all_calls() -> list[OpCall]:
    return [call for family in FAMILIES for call in importlib.import_module(family).CALLS]


def op_rows(machine: Machine, cubins: Iterable[Path], wanted: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The calls whose names contain one of `wanted`, all if that is empty; a call whose kernels are not in these cubins
    is left out."""
    kernels = Kernels(cubins)
    for call in all_calls():
        if wanted and not any(part in call.name for part in wanted):
            continue
        try:
            row = call.row(machine, kernels)
        except LookupError:
            continue
        yield row


def merged(rows: Sequence[dict[str, Any]], file: Path, commit: str) -> list[dict[str, Any]]:
    """The rows, each with its commit, and those of other calls that the file has, in the order of all_calls()."""
    kept = {row["call"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    kept |= {row["call"]: row | {"commit": commit} for row in rows}
    return [kept[call.name] for call in all_calls() if call.name in kept]


def op_line(row: dict[str, Any]) -> str:
    text = f"{row['call']:56} {row['us']:7} us = {row['ratio']} x floor"
    for launch in row["launches"]:
        parts = ", ".join(f"{phase} {cycles}" for phase, cycles in launch["cycles"].items())
        text += f"\n    {launch['kernel']}: {launch['us']} us + gap {launch['gap_us']}; {launch['ctas']} CTAs, "
        text += f"{launch['beside']} on an SM, {launch['waves']} waves, {launch['registers']} registers; "
        text += f"memory {launch['memory_us']} us; cycles: {parts}"
    return text


# ---- phases that several kernels have, reckoned

# Of a digit of a search (tile/radix.cuh): clearing the columns, adding them up, finding the bin, with their barriers.
DIGIT = 1000


def words_of(vocab: int, threads: int, *, bytes_of_one: int = 2, batch: int = 4) -> int:
    """Turns of a loop in which each thread takes `batch` words of 16 bytes of a row."""
    return math.ceil(vocab * bytes_of_one / 16 / threads / batch)


def sorting(count: int) -> Phase:
    """Of block_sort() (tile/block.cuh): steps with a barrier and two dependent accesses to shared memory."""
    rounds = math.ceil(math.log2(max(count, 2)))
    steps = rounds * (rounds + 1) / 2
    return Phase("sort", barriers=steps + 1, cycles=60 * steps)
