"""The passes of the verification kernels over a row of logits, in the same model.

A pass is a loop of csrc/cuda/logits.cuh that loads words of 16 bytes; it is known by the instructions that only it has.
The first pass reads a row from memory; the others find it in L2, but not where all rows are drawn for: those under way,
two for each multiprocessor, are more than L2 holds. What lies between the passes is left out. Where logits are counted,
additions to one bank of shared memory wait for each other as often as flat rows let them. Calls that draw for all rows
are lengthened by what an H200 took beyond these passes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bank_conflicts import mean_passes
from predict_loop import ctas_that_fit, figures, registers_of
from sass_listing import Function, Instruction, disassemble
from sass_loops import Flow, Loop
from sm_model import Machine

ROOT = Path(__file__).resolve().parents[2]
KERNEL = re.compile(r"\d(draw_rows|walk)_kernelILNS_5DTypeE2EE")  # of bf16: for all rows, and for those of the walk
LOGITS = 2048  # cycles are given for this many
PHILOX = re.compile(r"0x(d2511f53|cd9e8d57)|-0x(2daee0ad|326172a9)\b")  # its multipliers
WORD = 8  # logits of 16 bytes

# The shape of the calls, as in headline.py.
VOCAB, TREES, NODES, VISITED = 128256, 32, 64, 9


@dataclass(frozen=True)
class Pass:
    """Which loop, how deep loops inside are entered, the instructions that an iteration takes, and avoids."""

    loop: str
    levels: int
    does: str = ""
    avoids: str = ""


PASSES = {
    "peak": Pass("peak", 0),
    "peak and counts": Pass("counts", 1, does="atomic", avoids="count"),  # POPC: of lanes that note a word
    "race, no noise": Pass("race", 0, avoids="philox"),
    "race, all noise": Pass("race", 1, does="philox", avoids="logarithm"),
}
FROM_MEMORY = ("peak", "peak and counts")
# Of an H200's samples, while it drew for all rows (docs/notes/first-gpu-run.md): warps that wait behind a pass for the
# slowest one; dispatch, branches and fetches; on flat rows words of the race that are looked at again.
WAITS, DISPATCH, AGAIN = 0.11, 0.12, 0.11
# The passes of a call, and where they are of another length if the row is flat, so that every token counts. Ties at the
# threshold of top-p are counted only if one of them wins, one row in hundreds.
CALLS = {
    "greedy": (["peak"], ["peak"]),
    "temperature": (["peak", "race, no noise"], ["peak", "race, all noise"]),
    "top-p": (["peak and counts", "race, no noise"], ["peak and counts", "race, all noise"]),
}


def word_of_counter(lane: int, bits: int) -> int:
    """Where a lane counts a logit of bfloat16 (ValueCounts in csrc/cuda/value_counts.cuh)."""
    copies, first, magnitudes = 16, (127 - 8) << 7, 15 << 7
    magnitude = (bits & 0x7FFF) - first
    place = magnitude if 0 <= magnitude < magnitudes else magnitudes
    return ((bits >> 15) * (magnitudes // 4 + 1) + place // 4) * copies + lane % copies


def counting(machine: Machine) -> Machine:
    """The machine, with the passes that an addition to the counters takes."""
    return replace(machine, atomic_passes=mean_passes(word_of_counter, merges=False))


def does(instruction: Instruction) -> str:
    """Names what tells the passes apart; "" for most instructions."""
    if instruction.root == "LDG" and ".128" in instruction.opcode:
        return "word"
    if PHILOX.search(instruction.arguments):
        return "philox"
    kinds = {"ATOMS": "atomic", "F2I": "weight", "POPC": "count", "MUFU": "logarithm"}
    return kinds.get(instruction.root, "")


def row_loops(flow: Flow) -> dict[str, Loop]:
    """The first loop of each kind that itself, not in a loop inside, loads several words."""
    loops, found = flow.loops(), dict[str, Loop]()
    for loop in loops:
        inside = set().union(*(other.body for other in loops if other.body < loop.body))
        own = [does(x) for block in loop.body - inside for x in flow.blocks[block]]
        if own.count("word") < 4:
            continue
        kinds = Counter(does(x) for block in loop.body for x in flow.blocks[block])
        named = {"philox": "race", "weight": "masses", "atomic": "counts", "count": "ties"}
        found.setdefault(next((name for kind, name in named.items() if kind in kinds), "peak"), loop)
    return found


def path_of(flow: Flow, loop: Loop, of_pass: Pass) -> tuple[list[Instruction], int]:
    """An iteration, and the words that a thread takes in it.

    Rows are aligned and end in the vocabulary, as nearly all words are: of the ways that load words the shortest. Where
    rows are not aligned a word is put together from two, which costs more instructions than the loads are worth here.
    """
    worth = {"word": 12, of_pass.does: 400, of_pass.avoids: -3000} | {"": -1}
    inside = [other for other in flow.loops() if other.body < loop.body]
    heads = dict[int, int]()
    for other in inside:
        kinds = {does(x) for block in other.body for x in flow.blocks[block]}
        depth = sum(other.body < outer.body for outer in inside)
        heads[other.head] = -9000 if depth >= of_pass.levels else 100 if of_pass.does in kinds else 0

    def weight(instruction: Instruction) -> int:
        return worth.get(does(instruction), -1) + heads.get(instruction.address, 0)

    words = sum(does(x) == "word" for x in flow.path(loop, weight))
    path = flow.unrolled(loop, (words, WORD // 4)[: of_pass.levels], weight)
    return path, words


def threads_of_row() -> int:
    text = (ROOT / "csrc" / "cuda" / "logits.cuh").read_text()
    match = re.search(r"kRowThreads = (\d+);", text)
    assert match
    return int(match[1])


def pass_rows(machine: Machine, function: Function, wanted: list[str], num_stalls: int) -> Iterator[dict[str, Any]]:
    """The passes of a kernel, all if `wanted` is empty. Raises ValueError where one is not found."""
    match = KERNEL.search(function.name)
    assert match
    flow, threads = Flow(function), threads_of_row()
    loops = row_loops(flow)
    ctas = ctas_that_fit(machine, threads, registers_of(function), 0)
    if match[1] == "walk":  # a CTA alone on each of fewer multiprocessors
        machine, ctas = replace(machine, multiprocessors=TREES * ctas_of_tree(machine)), 1
    for name, of_pass in PASSES.items():
        instance = f"{match[1]}: {name}"
        if wanted and instance not in wanted:
            continue
        if of_pass.loop not in loops:
            raise ValueError(f"{match[1]}_kernel has no loop for {of_pass.loop}")
        path, words = path_of(flow, loops[of_pass.loop], of_pass)
        source = "memory" if name in FROM_MEMORY or match[1] == "draw_rows" else "l2"
        on = counting(machine) if of_pass.does == "atomic" else machine
        of_loop = figures(on, path, warps=threads // 32, ctas=ctas, source=source, num_stalls=num_stalls)
        share = LOGITS / (threads * ctas * words * WORD)
        for useless in ("tflop_per_s", "memory_share"):
            del of_loop[useless]
        yield {
            "machine": machine.name, "instance": instance, "kernel": match[1], "pass": name, **of_loop,
            "instructions": round(len(path) / words / WORD * 4), "cycles": round(of_loop["cycles"] * share),
            "iteration": of_loop["cycles"], "words": words,
        }  # fmt: skip


def verification_rows(
    machine: Machine, cubins: list[Path], wanted: list[str], num_stalls: int
) -> Iterator[dict[str, Any]]:
    for cubin in cubins:
        if not KERNEL.search(cubin.read_bytes().decode("latin-1")):
            continue
        for function in disassemble(cubin):
            if KERNEL.search(function.name):
                yield from pass_rows(machine, function, wanted, num_stalls)


def beyond(ways: list[str]) -> float:
    """What the time of a row's passes is multiplied by. One pass alone waits for memory."""
    again = AGAIN if "race, all noise" in ways else 0.0
    return 1 / (1 - WAITS - DISPATCH - again) if len(ways) > 1 else 1.0


def ctas_of_tree(machine: Machine) -> int:
    """CTAs that read a row together where each tree has its own walk: a cluster, as ctas_of_row() chooses."""
    ctas = 1
    while machine.architecture == "sm_90" and 2 * ctas <= 8 and 2 * ctas * TREES <= machine.multiprocessors:
        ctas *= 2
    return ctas


def cycles_of_node(machine: Machine, rows: list[dict[str, Any]]) -> float:
    """Predicts the passes over a visited node's row; each begins with a wait for the first words."""
    cycles = 0.0
    for row in rows:
        iterations = math.ceil(VOCAB / ctas_of_tree(machine) / (32 * row["warps"] * row["words"] * WORD))
        latency = machine.memory_latency if row["source"] == "memory" else machine.l2_latency
        cycles += iterations * row["iteration"] + latency
    return cycles


def calls(machine: Machine, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicts a call, in reads of all logits: at least, and where rows are flat; lazy: reads only visited rows."""
    of_pass = {(row["kernel"], row["pass"]): row for row in rows if row["machine"] == machine.name}
    read = 2 * LOGITS / machine.bytes_per_cycle("memory")
    all_logits = read * VOCAB / LOGITS * TREES * NODES / machine.multiprocessors
    found = []
    for name, ways in CALLS.items():
        all_rows = [beyond(way) * sum(of_pass["draw_rows", one]["cycles"] for one in way) / read for way in ways]
        nodes = [cycles_of_node(machine, [of_pass["walk", one] for one in way]) for way in ways]
        found.append(
            {
                "machine": machine.name,
                "call": name,
                "all_rows": [round(reads, 2) for reads in all_rows],
                "lazy": [round(VISITED * cycles / all_logits, 2) for cycles in nodes],
            }
        )
    return found
