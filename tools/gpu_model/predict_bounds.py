"""What each unit of a multiprocessor does, at the least, for 64 keys of a row tile: bounds from machine code.

For kernels of which some warps copy and others multiply (wgmma), where the simulation of a loop is no guide. The loops
of both kinds of warps are found, their instructions are charged to units at the rates of sm_model.py, and the unit
that is busy for longest bounds the tile. Latencies, waits and turns are left out: a kernel may be slower, not faster.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from predict_loop import SHARED_BYTES
from sass_listing import Function, Instruction, bytes_of
from sass_loops import Flow
from sass_roles import KEYS, WGMMA_SHAPE, Kind, Role, Roles, multiplies, rescales_with, roles_of, waits
from sm_model import GLOBAL, SHARED, WGMMA, Machine

import pagedtree as pt

PAGE_SIZE = 16  # of the cache
SHARED_RATE = 128  # bytes per cycle of shared memory
ROWS = (64, 128, 256, 512)  # of a KV head
HEAD_DIMS = (64, 128, 256)
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# Units of a scheduler of which an instruction takes one; "control" only takes an issue slot.
UNITS = {"tensor": "tensor", "slow": "mufu", "float": "float", "integer": "integer", "uniform": "uniform"}
SOFTMAX = {"FADD", "FMUL", "FFMA", "FMNMX", "MUFU", "F2FP", "SHFL"}


# ---- bounds


def shared_cycles(x: Instruction, machine: Machine) -> float:
    """Cycles of shared memory, which is also L1, for one warp's instruction; of a wgmma the quarter of its group's."""
    if shape := WGMMA_SHAPE.match(x.opcode):
        rows, columns, depth = map(int, shape.groups())
        element = 32 // depth  # bytes
        from_shared = rows if re.match(r"R\d+, gdesc", x.arguments) else 0
        return (from_shared + columns) * depth * element / SHARED_RATE / 4
    if x.root == "LDGSTS" or (x.root in GLOBAL and ".128" in x.opcode):
        return bytes_of(x) / SHARED_RATE
    if x.root in SHARED | GLOBAL and x.predicate != "!PT":
        return machine.use(x).cycles / machine.shared_factor
    return 0.0


def copying_cycles(machine: Machine, roles: Roles, head_dim: int) -> Counter[str]:
    """busy_cycles() of the producers, with what TMA writes to shared memory."""
    busy = busy_cycles(machine, roles.producers)
    busy["shared"] += 2 * KEYS * head_dim * 2 // SHARED_RATE * roles.has_tma
    return busy


def busy_cycles(machine: Machine, roles: Sequence[Role]) -> Counter[str]:
    """Cycles that the units of a multiprocessor are busy for 64 keys of one CTA. A scheduler has a quarter of its warps
    and one issue slot per cycle."""
    busy = Counter[str]()
    for role in roles:
        for x in role.path:
            busy["issue"] += role.share / 4  # type: ignore[assignment]
            if x.root in WGMMA and not multiplies(x):
                continue
            use = machine.use(x)
            if use.unit in UNITS:
                busy[UNITS[use.unit]] += use.cycles * role.share / 4  # type: ignore[assignment]
            busy["shared"] += shared_cycles(x, machine) * role.share  # type: ignore[assignment]
    return busy


def with_keys(machine: Machine, busy: Counter[str], kv_bytes: int, sharing: int) -> dict[str, float]:
    """Adds the bytes of K and V: all from L2, and from memory those that no other of `sharing` row tiles brings."""
    cycles: dict[str, float] = dict(busy)
    cycles["memory"] = kv_bytes / sharing / machine.bytes_per_cycle("memory")
    cycles["l2"] = kv_bytes / machine.bytes_per_cycle("l2")
    return {unit: round(value, 1) for unit, value in sorted(cycles.items())}


def bound(cycles: dict[str, float]) -> dict[str, Any]:
    """The tile's time, what takes it, and the share of each unit."""
    binds = max(cycles, key=lambda unit: cycles[unit])
    time = cycles[binds]
    return {
        "time": round(time), "binds": binds,
        "share": {unit: round(value / time, 3) for unit, value in cycles.items()}, "cycles": cycles,
    }  # fmt: skip


def synchronisation(role: Role) -> dict[str, float]:
    """Counts how often one warp synchronises for 64 keys. The second of two looks at an mbarrier is the wait."""
    path = role.path
    leaves = [next((y.predicate for y in path[i:] if y.root == "BRA"), "") for i in range(len(path))]
    waiting = {id(x) for x, predicate in zip(path, leaves, strict=True) if waits(x) and predicate.startswith("!")}
    kinds: dict[str, Kind] = {
        "barriers": lambda x: x.root == "BAR",
        "mbarrier_waits": lambda x: id(x) in waiting,
        "mbarrier_arrivals": lambda x: (x.root == "SYNCS" and "ARRIVE" in x.opcode) or x.root == "ARRIVES",
        "fences": lambda x: x.root in ("MEMBAR", "FENCE"),
    }
    return {name: role.count(kind) for name, kind in kinds.items()}


def work_of(roles: Roles) -> dict[str, Any]:
    """Instructions of one warp for 64 keys, those of its tensor work apart."""

    def others(role: Role) -> float:
        return role.count(lambda x: not multiplies(x))

    scaling = round(others(roles.rescaled) - others(roles.consumers), 1)
    is_apart = scaling > 0  # else every iteration scales
    plain = roles.consumers
    warps = sum(role.warps for role in roles.producers)
    copying = round(sum(others(role) * role.warps for role in roles.producers) / warps, 1)
    return {
        "wgmma": plain.count(multiplies),
        "others": others(plain),
        "softmax": plain.count(lambda x: x.root in SOFTMAX),
        "rescale": scaling if is_apart else plain.count(rescales_with(plain.path)),
        "always_rescales": not is_apart,
        "mask": round(others(roles.masked) - others(plain), 1),
        "producers": copying,  # the mean of the warps
        "producers_mask": round(others(roles.masked_producers) - copying, 1),
        "producer_warps": warps,
        "consumers_synchronise": synchronisation(plain),
        "producers_synchronise": synchronisation(roles.producers[0]),
        "opcodes": dict(Counter(x.root for x in plain.path).most_common()),
    }


# ---- our kernels


def tile_at(machine: Machine, engine: str, head_dim: int, rows: int, element: int) -> pt.AttentionLaunch:
    return pt.explain(
        [rows], [4096], num_q_heads=1, num_kv_heads=1, head_dim=head_dim, page_size=PAGE_SIZE, kv_bytes=element,
        num_sms=machine.multiprocessors, max_shared_bytes=SHARED_BYTES[machine.architecture], engine=engine,
    ).launches[0]  # fmt: skip


def our_rows(machine: Machine, functions: dict[tuple[str, str], Function]) -> Iterator[dict[str, Any]]:
    """functions: by engine and name, as "bf16/fp8-128-64"; what is missing is left out. The first row of a tile has its
    instructions too."""
    for dtypes, element in (("bf16", 2), ("bf16/fp8", 1)):
        for head_dim in HEAD_DIMS:
            for engine in ("wgmma", "mma.sync"):
                found: dict[int, tuple[Counter[str], dict[str, Any]]] = {}
                for rows in ROWS:
                    tile = tile_at(machine, engine, head_dim, rows, element)
                    function = functions.get((engine, f"{dtypes}-{head_dim}-{tile.m_tile}"))
                    if function is None:
                        continue
                    if tile.m_tile not in found:
                        found[tile.m_tile] = look_at(machine, function, tile, head_dim)
                    busy, work = found[tile.m_tile]
                    found[tile.m_tile] = busy, {}
                    tiles = -(-rows // tile.m_tile)
                    cycles = with_keys(machine, busy, 2 * KEYS * head_dim * element, tiles)
                    yield {
                        "machine": machine.name, "kernel": engine, "dtypes": dtypes, "head_dim": head_dim,
                        "rows": rows, "tile": tile.m_tile, "tiles": tiles, **bound(cycles), **work,
                    }  # fmt: skip


def look_at(
    machine: Machine, function: Function, tile: pt.AttentionLaunch, head_dim: int
) -> tuple[Counter[str], dict[str, Any]]:  # fmt: skip
    warps = tile.row_warps * tile.key_warps
    if tile.engine == "mma.sync":
        return busy_cycles(machine, [Role(Flow(function).main_path(), warps, tile.keys_per_stage)]), {}
    roles = our_roles(function, warps, head_dim)
    busy = busy_cycles(machine, [roles.consumers]) + copying_cycles(machine, roles, head_dim)
    return busy, {"work": work_of(roles)}


def our_roles(function: Function, warps: int, head_dim: int) -> Roles:
    """A box has 64 columns of the keys in a page."""
    return roles_of(function, warps, producers=4, boxes=head_dim // 64 * KEYS // PAGE_SIZE)


# ---- ideas, calculated from shapes alone


def swapped(machine: Machine, head_dim: int, rows: int, element: int, decoding: Counter[str]) -> dict[str, float]:
    """Few rows as the columns of wgmma, keys as its rows: K Q^T, then V^T P^T with P through shared memory.

    decoding: what the producers of our kernel with as many columns do. The instructions of the softmax are estimated:
    4.5 for a score, the largest of a column by 3 shuffles of lanes and over 4 warps, and 60 more.
    """
    instructions = 2 * head_dim // 16
    own = Counter[str](decoding)
    scores = rows // 2  # of a thread
    columns = rows // 4
    own["tensor"] += instructions * max(8, rows // 2)
    own["shared"] += instructions * (64 + rows) * 32 // SHARED_RATE + rows  # both operands; P
    own["mufu"] += 8 * scores
    own["issue"] += instructions + int(4.5 * scores) + columns * (6 + 9) + 60
    return with_keys(machine, own, 2 * KEYS * head_dim * element, 1)


def ideas(machine: Machine, functions: dict[tuple[str, str], Function]) -> list[dict[str, Any]]:
    """Tells whether two ideas can gain: each row has the bound with the idea, and what there is without it."""
    file = RESULTS / f"predicted_{machine.name.split()[0].lower()}.json"
    simulated = {row["instance"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    found: list[dict[str, Any]] = []
    for dtypes, element in (("bf16", 2), ("bf16/fp8", 1)):
        for head_dim in (64, 128):
            roles = our_roles(functions["wgmma", f"{dtypes}-{head_dim}-64"], 4, head_dim)
            for rows in (16, 32):
                name = f"{dtypes}-{head_dim}-{rows}"
                cycles = swapped(machine, head_dim, rows, element, copying_cycles(machine, roles, head_dim))
                row = {"idea": "swap-AB", "instance": name, **bound(cycles)}
                row["memory_share"] = round(cycles["memory"] / row["time"] * machine.read_share, 3)
                row["memory_share_now"] = simulated.get(name, {}).get("memory_share")
                found.append(row)
    for row in our_rows(machine, {key: f for key, f in functions.items() if key[0] == "wgmma"}):
        if row["rows"] == 256 and row["dtypes"] == "bf16":
            halved = bound({**row["cycles"], "l2": row["cycles"]["l2"] / 2})
            name = f"{row['dtypes']}-{row['head_dim']}-{row['tile']}"
            found.append({"idea": "multicast", "instance": name, **halved, "time_now": row["time"]})
    return found
