"""Cycles of a kernel's loop on a multiprocessor: warps in order, one instruction per cycle and sub-partition, and units
with queues. A loop of 1000 instructions and 8 warps takes one to three seconds."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sass_listing import Instruction, bytes_of
from sm_model import Machine

NEVER = 1 << 60
WGMMA_BOARD = 6  # of groups of wgmma, which count as a scoreboard does
LEAD = 2  # iterations that a warp of a sub-partition may be ahead of another


@dataclass
class Step:
    """An instruction of the loop as the multiprocessor sees it."""

    instruction: Instruction
    unit: str
    cycles: float
    way: str
    stall: int
    is_taken: bool
    latency: int = 0
    bytes: int = 0
    # Waits until at most so many are under way of a scoreboard's copies, or of the groups of wgmma.
    at_most: tuple[int, int] | None = None
    barrier: str = ""
    waits_at_barrier: bool = False


def steps_of(machine: Machine, path: Sequence[Instruction], groups_under_way: int | None, source: str) -> list[Step]:
    """groups_under_way: of cp.async where the loop waits for the oldest; None: as the code says. source: where copies
    come from, "memory" or "l2"."""
    found = []
    for i, instruction in enumerate(path):
        unit, cycles, way = machine.use(instruction)
        is_taken = path[(i + 1) % len(path)].address != instruction.address + 16
        stall = max(1, instruction.stall) + machine.branch * is_taken
        step = Step(instruction, unit, cycles, way, stall, is_taken, _latency(machine, instruction, way, source))
        # Scalar loads are of cache lines that are near.
        if way == "copy" or (way == "global" and ".128" in instruction.opcode):
            step.bytes = bytes_of(instruction)
        root, arguments = instruction.root, instruction.arguments
        if root == "DEPBAR" and (match := re.match(r"SB(\d), 0x(\w+)", arguments)):
            step.at_most = int(match[1]), int(match[2], 16) if groups_under_way is None else groups_under_way
        elif root == "WARPGROUP" and (match := re.search(r"gsb0, 0x(\w+)", arguments)):
            step.at_most = WGMMA_BOARD, int(match[1], 16)
        elif root == "BAR":
            match = re.match(r"0x\w+|U?R\w+", arguments)
            arrives = any(kind in instruction.opcode for kind in (".SYNC", ".ARV", ".RED"))
            step.barrier = (match[0] if match else "0x0") if arrives else ""
            step.waits_at_barrier = ".ARV" not in instruction.opcode
        found.append(step)
    return found


def _latency(machine: Machine, instruction: Instruction, way: str, source: str) -> int:
    special = {
        "LDSM": machine.matrix_latency,
        "SHFL": machine.shuffle_latency,
        "LDL": machine.l1_latency,
        "STL": machine.l1_latency,
    }
    far = machine.l2_latency if source == "l2" else machine.memory_latency
    if way == "global" and ".128" not in instruction.opcode and ".64" not in instruction.opcode:
        return special.get(instruction.root, machine.l1_latency)
    of_way = {"shared": machine.shared_latency, "slow": machine.slow_latency, "global": far, "copy": far}
    return special.get(instruction.root, of_way.get(way, 0))


@dataclass(eq=False)
class Warp:
    part: int
    cta: int
    ready: int  # no look before
    at: int = 0
    rounds: list[int] = field(default_factory=list)  # when each iteration was over
    boards: list[int] = field(default_factory=lambda: [0] * 7)  # what is under way
    owners: list[str] = field(default_factory=lambda: [""] * 7)
    copied: float = 0.0  # when the last of its copies has arrived
    why: str = "start"
    in_barrier: bool = False


@dataclass(frozen=True)
class Prediction:
    """What holds in the steady state.

    Attributes:
        cycles: those that one iteration of every warp takes.
        stalls: (instruction, reason) -> cycles per iteration that a warp loses.
        busy: unit -> share of the time.
    """

    cycles: float
    stalls: Counter[tuple[Instruction, str]]
    busy: dict[str, float]


class Simulator:
    """`ctas` CTAs of `warps` warps that execute `steps` for ever; each begins `skew` cycles behind the one before."""

    def __init__(self, machine: Machine, steps: Sequence[Step], warps: int, ctas: int, skew: int, source: str) -> None:
        self.machine, self.steps = machine, steps
        self.warps = [Warp(i % 4, cta, cta * skew) for cta in range(ctas) for i in range(warps)]
        self.parts = [[warp for warp in self.warps if warp.part == part] for part in range(4)]
        self.last: list[Warp | None] = [None] * 4
        self.turns: list[list[Warp] | None] = [None] * 4  # None: to be found anew
        self.ended_a_round = True  # a warp, since this was last looked at
        self.free = [Counter[str]() for _ in range(4)]
        self.queues = [deque[int]() for _ in range(4)]  # when the loads that wait leave
        self.load_turn = [0.0] * 4
        self.shared_free = self.memory_free = 0.0
        self.rate = machine.bytes_per_cycle(source)
        self.events: list[tuple[int, int, Warp, int]] = []  # when a scoreboard of a warp is released
        self.order = 0
        self.arrived: dict[tuple[int, str], list[Warp]] = {}
        self.warps_of_cta = warps
        self.stalls: Counter[tuple[Instruction, str]] = Counter()
        self.busy: Counter[str] = Counter()
        self.now = 0

    def run(self, warm: int, rounds: int) -> Prediction:
        """How many iterations are not counted, and how many are."""
        begin, done = None, 0
        while True:
            self._release()
            if self.ended_a_round:
                done, self.ended_a_round = min(len(warp.rounds) for warp in self.warps), False
            if begin is None and done >= warm:
                begin = self.now
                self.stalls.clear()
                self.busy.clear()
            if begin is not None and done >= warm + rounds:
                break
            self._cycle()
        times = [(warp.rounds[warm + rounds - 1] - warp.rounds[warm - 1]) / rounds for warp in self.warps]
        cycles, total = sum(times) / len(times), self.now - begin
        share = cycles / total / len(self.warps)
        return Prediction(
            cycles,
            Counter({key: value * share for key, value in self.stalls.items()}),
            {unit: value / total for unit, value in self.busy.items()},
        )

    def _release(self) -> None:
        while self.events and self.events[0][0] <= self.now:
            _, _, warp, board = heapq.heappop(self.events)
            warp.boards[board] -= 1
            if warp.ready == NEVER and not warp.in_barrier:
                warp.ready = self.now

    def _set(self, warp: Warp, board: int, until: float, owner: str) -> None:
        warp.boards[board] += 1
        warp.owners[board] = owner
        self.order += 1
        heapq.heappush(self.events, (math.ceil(until), self.order, warp, board))

    def _cycle(self) -> None:
        """Lets each sub-partition issue, and goes on to the next cycle in which something can happen."""
        waiting: list[tuple[Warp, str]] = []
        soonest, has_issued = self.events[0][0] if self.events else NEVER, False
        for part in range(4):
            chosen = None
            turns = self.turns[part]
            if turns is None:
                turns = self.turns[part] = self._by_turn(part)
            for warp in turns:
                if warp.ready <= self.now and (stop := self._stop(warp)):
                    warp.why, warp.ready = stop
                if warp.ready > self.now:
                    if warp.ready < soonest:
                        soonest = warp.ready
                    waiting.append((warp, warp.why))
                elif chosen is None:
                    chosen = warp
                else:
                    waiting.append((warp, "not selected"))
            if chosen:
                self._issue(chosen)
                if self.last[part] is not chosen:
                    self.last[part], self.turns[part] = chosen, None
                has_issued = True
        following = self.now + 1 if has_issued else soonest
        if following >= NEVER:
            raise RuntimeError(f"no warp can go on: {', '.join(sorted({warp.why for warp in self.warps}))}")
        for warp, reason in waiting:
            self.stalls[self.steps[warp.at].instruction, reason] += following - self.now
        self.now = following

    def _by_turn(self, part: int) -> list[Warp]:
        """The warp that issued last, then the others by age; barriers in a kernel see to it that no warp starves."""
        warps, last = self.parts[part], self.last[part]
        done = [len(warp.rounds) for warp in warps]
        if done and max(done) > min(done) + LEAD:
            return sorted(warps, key=lambda warp: len(warp.rounds))
        return warps if last is None else [last, *(warp for warp in warps if warp is not last)]

    def _stop(self, warp: Warp) -> tuple[str, int] | None:
        """Why the warp cannot issue, and when to look again."""
        step = self.steps[warp.at]
        for board in step.instruction.waits:
            if warp.boards[board]:
                return warp.owners[board], NEVER
        if step.at_most and warp.boards[step.at_most[0]] > step.at_most[1]:
            return ("wgmma" if step.at_most[0] == WGMMA_BOARD else "cp.async"), NEVER
        if step.way in ("fixed", "slow"):
            free = self.free[warp.part][step.unit]
            return (f"unit {step.unit}", free) if free > self.now else None
        if step.way == "async":
            return None
        queue = self.queues[warp.part]
        while queue and queue[0] <= self.now:
            queue.popleft()
        return ("queue of shared memory", queue[0]) if len(queue) >= self.machine.load_queue else None

    def _issue(self, warp: Warp) -> None:
        step = self.steps[warp.at]
        result_at = self._occupy(warp, step)
        if step.instruction.sets is not None:
            # LDGDEPBAR counts as a copy that ends with the warp's last one.
            until = (
                max(result_at, warp.copied) if step.instruction.root == "LDGDEPBAR" else max(result_at, self.now + 1)
            )
            self._set(warp, step.instruction.sets, until, f"result of {step.instruction.root}")
        warp.ready = self.now + step.stall
        warp.why = "branch" if step.is_taken else f"stall behind {step.unit}"
        if step.barrier:
            self._arrive(warp, step)
        warp.at += 1
        if warp.at == len(self.steps):
            warp.at = 0
            warp.rounds.append(self.now)
            self.turns[warp.part], self.ended_a_round = None, True

    def _occupy(self, warp: Warp, step: Step) -> float:
        """Takes the units that the instruction needs; returns when its result is there."""
        machine, part, reads = self.machine, warp.part, step.instruction.reads
        if step.way in ("fixed", "slow"):
            self.free[part][step.unit] = self.now + math.ceil(step.cycles)
            self.busy[step.unit] += step.cycles / 4
            if step.way == "slow" and reads is not None:
                self._set(warp, reads, self.now + 10, f"read by {step.instruction.root}")
            return self.now + (step.stall if step.way == "fixed" else step.cycles + step.latency)
        if step.way == "async":
            start = max(self.now, self.free[part]["wgmma"])
            self.free[part]["wgmma"] = start + math.ceil(step.cycles)
            self.busy["tensor"] += step.cycles / 4
            if "gsb0" in step.instruction.arguments:
                self._set(warp, WGMMA_BOARD, start + step.cycles + 24, "wgmma")
            return self.now + step.stall
        turn = max(self.now + 2, self.load_turn[part])
        start = max(turn, self.shared_free)
        self.load_turn[part] = max(turn + machine.load_interval, start)
        self.shared_free = start + step.cycles
        self.busy["shared"] += step.cycles
        self.queues[part].append(math.ceil(start))
        result_at = start + step.cycles + step.latency
        if step.bytes:
            self.memory_free = max(self.memory_free, start) + step.bytes / self.rate
            self.busy["memory"] += step.bytes / self.rate
            result_at = max(result_at, self.memory_free + step.latency)
        if step.way == "copy":
            warp.copied = max(warp.copied, result_at)
        if reads is not None:
            self._set(warp, reads, start + step.cycles + 8, f"read by {step.instruction.root}")
        return result_at

    def _arrive(self, warp: Warp, step: Step) -> None:
        group = self.arrived.setdefault((warp.cta, step.barrier), [])
        group.append(warp)
        if step.waits_at_barrier:
            warp.ready, warp.why, warp.in_barrier = NEVER, "barrier", True
        if len(group) == self.warps_of_cta:
            for other in group:
                if other.in_barrier:
                    other.ready, other.in_barrier = self.now + self.machine.barrier_latency, False
            group.clear()


def predict(
    machine: Machine,
    path: Sequence[Instruction],
    *,
    warps: int,
    ctas: int,
    source: str = "memory",
    groups_under_way: int | None = None,
    rounds: int = 14,
) -> Prediction:
    """The prediction of median cycles over several offsets between the CTAs of a multiprocessor."""
    steps = steps_of(machine, path, groups_under_way, source)
    guess = sum(step.cycles for step in steps) * warps * ctas / 4
    warm = 16 if source == "memory" else 5  # a ring of stages has to run empty first
    offsets = (0.37, 0.11, 0.73) if ctas > 1 else (0.0,)
    found = [
        Simulator(machine, steps, warps, ctas, int(2 * guess * offset / ctas), source).run(warm, rounds)
        for offset in offsets
    ]
    return sorted(found, key=lambda prediction: prediction.cycles)[len(found) // 2]
