"""What a call of tree_delta_rule with one decay for each head costs, in the same model.

The kernel of csrc/cuda/recurrent is followed phase by phase: each loop is known by the instructions that only it has,
and how often a CTA goes through it follows from the number of nodes. The sum of the phases is the time of a CTA; those
that share a multiprocessor run beside each other. Reading the state is the memory's bandwidth; launches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from predict_loop import ctas_that_fit, registers_of
from sass_listing import Function, Instruction, disassemble
from sass_loops import Flow, Loop, Weight
from sm_model import Machine
from sm_simulator import predict

WARPS, COLUMNS, BLOCK = 8, 32, 8  # of a CTA; columns of the state, and tokens that are solved together
READS = COLUMNS // 8  # products of 8 tokens with the state
LEVELS = 8  # of the tree that is predicted beside the chain: nodes in levels of equal size

# The calls that are predicted: Qwen3-Next's linear attention, in bf16.
HEADS, KEY_HEADS, DIM = 32, 16, 128
PASSES = DIM // 64  # over 64 channels of the products
CALLS = [(nodes, batch) for nodes in (8, 16, 32, 64, 128) for batch in (1, 8, 32)]


def count(flow: Flow, loop: Loop, root: str) -> int:
    return sum(x.root == root for block in loop.body for x in flow.blocks[block])


def the(loops: list[Loop], what: str) -> Loop:
    if len(loops) != 1:
        raise ValueError(f"delta_rule_kernel has {len(loops)} loops for {what}, expected one")
    return loops[0]


class Phases:
    """Instructions of a warp in each phase."""

    def __init__(self, function: Function) -> None:
        flow = Flow(function)
        loops = flow.loops()

        def chosen(test: Callable[[Loop], bool]) -> list[Loop]:
            """The smallest of the loops inside each other that pass."""
            passed = [loop for loop in loops if test(loop)]
            return [loop for loop in passed if not any(other.body < loop.body for other in passed)]

        def has(**least: int) -> Callable[[Loop], bool]:
            return lambda loop: all(count(flow, loop, root) >= least[root] for root in least)

        def way(loop: Loop, **worth: int) -> list[Instruction]:
            weight: Weight = lambda x: worth.get(x.root, -1)  # noqa: E731
            return flow.path(loop, weight)

        jobs = the(chosen(has(HMMA=24)), "products")
        passes = the(
            [loop for loop in chosen(lambda loop: jobs.body < loop.body and count(flow, loop, "BAR") == 1)], "a pass"
        )
        links = the([x for x in chosen(has(BAR=2)) if not count(flow, x, "FFMA")], "links")
        solves = the([x for x in chosen(has(BAR=2, FFMA=28)) if x.head > jobs.head], "a block")
        inside = [x for x in loops if x.body < solves.body and count(flow, x, "FFMA") == 2 * BLOCK]
        earlier = min(inside, key=lambda loop: loop.head)
        self.link = way(links, LDS=40, STS=40)
        self.read = way(jobs, HMMA=400, LDG=-3000)
        self.keys = flow.path(jobs, keys_weight)
        self.load = [x for x in way(passes, LDG=40) if x.address not in {y.address for y in way(jobs, LDG=40)}]
        self.earlier = way(earlier, FFMA=400)
        block = [x for x in way(solves, FFMA=40, LDS=40, BAR=40) if x.address not in {y.address for y in self.earlier}]
        begin, end = (i for i, x in enumerate(block) if x.root == "BAR")
        self.solve = block[begin + 1 : end]  # by one warp
        self.block = block[: begin + 1] + block[end:]


def keys_weight(x: Instruction) -> int:
    """Weighs products with keys: words of 8 bytes are loaded, single elements and the state are not."""
    if x.root == "LDG":
        return 400 if ".64" in x.opcode else -3000
    return {"HMMA": 100, "LDS": -40}.get(x.root, -1)


def group_of(nodes: int) -> int:
    """Tokens that are weighed together, as group_size() chooses for 128 channels."""
    group = WARPS * BLOCK
    while group > BLOCK and (group // 2 >= nodes or shared_bytes(nodes, group) > 96 << 10):
        group //= 2
    return group


def shared_bytes(nodes: int, group: int) -> int:
    """As ChunkSizes."""
    words = math.ceil(nodes / 32)
    floats = DIM * (COLUMNS + 2) + nodes * COLUMNS + 2 * group * (words * 32 + BLOCK + COLUMNS + 8) + nodes * words
    return 6144 + 4 * floats


def trips(nodes: int, is_chain: bool) -> dict[str, float]:
    """Counts how often a warp goes through each phase; of those that warps share, the mean."""
    group, blocks = group_of(nodes), math.ceil(nodes / BLOCK)
    parts = WARPS / (group // BLOCK)  # warps that share the products of 8 tokens
    pairs = blocks * (blocks + 1) / 2
    # In a tree of levels a token has as many ancestors as levels above it, which lie in different blocks.
    ancestors = nodes * (nodes - 1) / 2 if is_chain else nodes * (min(LEVELS, nodes) - 1) / 2
    return {
        "link": math.ceil(math.log2(max(nodes, 2))) + 1,
        "load": PASSES * math.ceil(nodes / group),
        "read": PASSES * READS * math.ceil(nodes / group) / parts,
        "keys": PASSES * pairs / (group // BLOCK) / parts,
        "block": blocks,
        "solve": blocks,
        "earlier": blocks * (blocks - 1) / 2 if is_chain else min(ancestors / BLOCK, blocks * (blocks - 1) / 2),
    }


PHASES = ("link", "load", "read", "keys", "earlier", "block", "solve")


def phase_cycles(machine: Machine, phases: Phases, ctas: int) -> dict[str, float]:
    """Predicts the cycles of each phase once, where `ctas` are on a multiprocessor."""
    found = {}
    for name in PHASES:
        source, warps = "l2" if name in ("load", "keys") else "memory", 1 if name == "solve" else WARPS
        found[name] = predict(machine, getattr(phases, name), warps=warps, ctas=ctas, source=source).cycles
    return found


def moved_bytes(nodes: int, batch: int) -> int:
    """State, q, k, v and outputs, each once; g and beta."""
    of_node = 2 * (2 * KEY_HEADS + 2 * HEADS) * DIM + 8 * HEADS
    return batch * (4 * HEADS * DIM * DIM + nodes * of_node)


def recurrent_rows(
    machine: Machine, cubins: list[Path], calls: Sequence[tuple[int, int]] = CALLS
) -> Iterator[dict[str, Any]]:
    for cubin in cubins:
        for function in disassemble(cubin, lambda name: "delta_rule_kernel" in name):
            phases, registers = Phases(function), registers_of(function)
            cycles = lru_cache(partial(phase_cycles, machine, phases))
            for nodes, batch in calls:
                yield call_row(machine, cycles, registers, nodes, batch)


def call_name(nodes: int, batch: int) -> str:
    return f"delta rule, {nodes} nodes x {batch}"


def call_row(
    machine: Machine, cycles: Callable[[int], dict[str, float]], registers: int, nodes: int, batch: int
) -> dict[str, Any]:
    """cycles: what each phase takes once, by the number of CTAs on a multiprocessor."""
    most = ctas_that_fit(machine, WARPS * 32, registers, shared_bytes(nodes, group_of(nodes)))
    all_ctas = batch * HEADS * DIM // COLUMNS
    ctas = min(most, math.ceil(all_ctas / machine.multiprocessors))
    floor = moved_bytes(nodes, batch) / (machine.memory_gb_per_s * machine.read_share * 1e9)
    row: dict[str, Any] = {
        "machine": machine.name, "instance": call_name(nodes, batch), "nodes": nodes, "batch": batch,
        "ctas": ctas, "registers": registers, "floor_us": round(floor * 1e6, 2),
    }  # fmt: skip
    # The state of a CTA comes at its part of the bandwidth, not before a load's latency has passed.
    state = max(2 * machine.memory_latency, 4 * DIM * COLUMNS * ctas / machine.bytes_per_cycle("memory"))
    for kind in ("chain", "tree"):
        number = trips(nodes, kind == "chain")
        parts = {"state": state} | {name: number[name] * once for name, once in cycles(ctas).items()}
        total = sum(parts.values()) * max(1.0, all_ctas / machine.multiprocessors / ctas)
        row[kind] = {name: round(part) for name, part in parts.items()}
        row[f"{kind}_us"] = round(total / machine.ghz / 1e3, 2)
        if kind == "chain":
            row["cycles"] = round(total)
    return row
