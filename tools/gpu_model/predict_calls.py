"""What whole calls of tree_attention cost, in the same model: the plan's work for each CTA, L2, launches, the join.

`pagedtree._C.explain_attention` cuts the work with the headers that the kernels use, and replays what each CTA reads,
all CTAs in step, a KV tile of 64 keys each at a time. Here each step gets a time: that of the tiles on the SM with the
most CTAs, or that of the bytes that leave memory, whichever is longer. What comes before the first key, between row
tiles and in the join is a number of dependent loads. All of it is predicted; nothing here was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from predict_bounds import look_at, with_keys
from predict_loop import SHARED_BYTES, figures
from sass_listing import Function
from sass_loops import Flow
from sm_model import Machine

from pagedtree import _C, explain

# ---- assumptions. Clock, multiprocessors, bandwidth and latencies are those of sm_model.py.

# Data sheets: bytes of L2, all of it for K and V; flops per second of 16 bits, dense.
L2_BYTES = {"A100 SXM 80 GB": 40_000_000, "H100 SXM": 50_000_000, "H200 SXM": 50_000_000}
TENSOR_FLOPS = {"A100 SXM 80 GB": 312e12, "H100 SXM": 989e12, "H200 SXM": 989e12}
# From the end of a kernel to the first instruction of the next one in a graph, launched early (programmatic dependent
# launch), as attention is behind append_kv and the join behind attention. Reckoned: NVIDIA states none for this GPU.
DEPENDENT_GAP_US = 0.4
# Cycles of instructions and barriers around a load whose result the next load needs, and those of a load from L1.
AROUND_A_LOAD, L1_LATENCY = 60, 40

# ---- what the kernels do, read in csrc/cuda/attention

# Dependent loads from L2 and from L1 before the copies of the first keys begin. L2: the plan with the lengths of the
# first 128 sequences; Q with mask words and page ids. L1, as these were fetched before: lengths, mask words, page ids.
FIRST_LOADS, FIRST_NEAR_LOADS = 2, 3
# Of each further row tile: Q with mask words and page ids, and the first keys, which the kernel for wgmma copies while
# the last output is written; L1: as above.
LATER_LOADS, LATER_NEAR_LOADS = {"mma.sync": 2, "wgmma": 1}, 3
# The join: threads and columns of a thread, CTAs that registers leave on an SM, loads of a CTA before its pieces (the
# plan with the lengths; then from L1 starts and lengths of three parts of the ranges, those of the row tile, and how
# many pieces it has), and pieces that are in flight together.
JOIN_THREADS, JOIN_COLUMNS, JOIN_CTAS = 128, 4, 6
JOIN_LOADS, JOIN_NEAR_LOADS, JOINED_AT_ONCE = 1, 9, 8

HEAD_DIM, KEYS, BYTES = 128, 64, 2  # BYTES of an element of q, K, V and out
KV_TILE_BYTES = 2 * KEYS * HEAD_DIM * BYTES
INSTANCES_OF_CALLS = tuple(f"bf16-{HEAD_DIM}-{rows}" for rows in (16, 32, 64, 128))


@dataclass(frozen=True)
class Call:
    """A call in bf16 with heads of 128; one entry per sequence. group: query heads per KV head."""

    name: str
    query_lens: list[int]
    seq_lens: list[int]
    group: int = 4
    window: int = 0
    page_size: int = 16
    num_kv_heads: int = 8


def even(batch: int, length: int, nodes: int, **others: int) -> Call:
    """Equal sequences; trees count as chains of as many nodes."""
    kind = f"prompt of {nodes}" if nodes == length else f"L {length // 1024}k, T {nodes}"
    further = "".join(f", {name.replace('_', ' ')} {value}" for name, value in others.items())
    return Call(f"B {batch}, {kind}{further}", [nodes] * batch, [length] * batch, **others)


RAGGED = [1 + 37 * i % 64 for i in range(32)], [512 + 7919 * i * i % 16384 for i in range(32)]
CALLS = [
    *(even(1, length, nodes) for length in (1024, 8192, 32768, 131072) for nodes in (1, 16, 64)),
    *(even(8, length, nodes) for length in (8192, 32768) for nodes in (1, 16, 64)),
    *(even(32, 8192, nodes) for nodes in (1, 16, 64, 128, 256)),
    *(even(256, 1024, nodes) for nodes in (1, 16)),
    even(1, 131072, 16, window=4096),
    even(1, 32768, 16, window=4096),
    even(1, 32768, 16, window=128, group=8),
    even(8, 32768, 16, window=4096),
    even(8, 32768, 8, window=1024),
    even(32, 8192, 16, window=1024),
    even(64, 16384, 8, window=128, group=8),
    even(1, 2048, 2048),
    even(1, 8192, 8192),
    even(4, 2048, 2048),
    even(1, 8192, 8192, window=1024),
    even(1, 8192, 2048),
    even(1, 32768, 2048),
    even(1, 32768, 512, window=1024),
    even(1, 8192, 16, page_size=1),
    even(32, 8192, 16, page_size=1),
    Call("32 trees of 1 to 64 nodes, L 0.5k to 16k", *RAGGED),
    Call("31 tokens and a chunk of 512, L 4k", [1] * 31 + [512], [4096] * 32),
]


def device_of(machine: Machine, engine: str) -> dict[str, Any]:
    """What `explain` asks for."""
    shared = SHARED_BYTES[machine.architecture]
    return {"num_sms": machine.multiprocessors, "max_shared_bytes": shared, "engine": engine}


# ---- tiles


def tile_row(machine: Machine, engine: str, name: str, function: Function) -> dict[str, Any]:
    """Cycles of an SM for one KV tile of each of 1, 2 ... CTAs on it, from L2, and from a memory of endless bandwidth.

    Those of the kernel for wgmma are bounds: it may be slower.
    """
    rows = int(name.split("-")[-1])
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": HEAD_DIM}
    tile = explain([rows], [4096], **sizes, **device_of(machine, engine)).launches[0]
    of_ctas = range(1, tile.ctas_per_sm + 1)
    near = replace(machine, memory_gb_per_s=1e9)
    if engine == "wgmma":
        busy, _ = look_at(machine, function, tile, HEAD_DIM)
        one = max(with_keys(near, busy, KV_TILE_BYTES, 1).values())
        cycles = {source: [round(one * ctas) for ctas in of_ctas] for source in ("l2", "memory")}
    else:
        path, stages = Flow(function).main_path(), KEYS // tile.keys_per_stage
        under_way = {"warps": tile.row_warps * tile.key_warps, "groups_under_way": max(tile.stages - 2, 0)}
        cycles = {
            source: [stages * figures(near, path, ctas=ctas, source=source, **under_way)["cycles"] for ctas in of_ctas]
            for source in ("l2", "memory")
        }
    return {"machine": machine.name, "engine": engine, "instance": name, **cycles}


def tile_rows(machine: Machine, functions: dict[tuple[str, str], Function]) -> Iterator[dict[str, Any]]:
    """functions: by engine and instance."""
    for (engine, name), function in functions.items():
        yield tile_row(machine, engine, name, function)


# ---- calls


def arguments_of(machine: Machine, call: Call, engine: str) -> dict[str, Any]:
    """Of `explain` and of what is below it."""
    heads = {"num_q_heads": call.num_kv_heads * call.group, "num_kv_heads": call.num_kv_heads}
    lengths = {"query_lens": call.query_lens, "seq_lens": call.seq_lens, "max_seqlen_q": max(call.query_lens)}
    cache = {"head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM, "latent": False, "kv_bytes": BYTES, "window": call.window}
    return {**lengths, **heads, **cache, **device_of(machine, engine), "l2_bytes": L2_BYTES[machine.name]}


def launches_of(machine: Machine, call: Call, engine: str) -> list[dict[str, Any]]:
    """What `explain` tells of each launch, with what its CTAs do."""
    return _C.explain_attention(**arguments_of(machine, call, engine))


def tile_of(launch: dict[str, Any]) -> tuple[str, str]:
    """The engine and the instance."""
    return launch["engine"], f"bf16-{HEAD_DIM}-{launch['m_tile']}"


def main_cycles(machine: Machine, launch: dict[str, Any], tile: dict[str, Any]) -> float:
    """All steps, one after the other."""
    memory = machine.bytes_per_cycle("memory") * machine.multiprocessors
    cycles = 0.0
    for count, tiles, from_memory, busiest in launch["replayed"]["steps"]:
        far = from_memory / tiles
        working = far * tile["memory"][busiest - 1] + (1 - far) * tile["l2"][busiest - 1]
        cycles += count * max(working, from_memory * KV_TILE_BYTES / memory)
    return cycles


def load_cycles(machine: Machine, far: int, near: int) -> float:
    """Dependent loads, from L2 and from L1."""
    return far * (machine.l2_latency + AROUND_A_LOAD) + near * (L1_LATENCY + AROUND_A_LOAD)


def begin_cycles(machine: Machine) -> float:
    """From the first instruction to the first key."""
    return load_cycles(machine, FIRST_LOADS, FIRST_NEAR_LOADS) + machine.memory_latency


def edge_cycles(machine: Machine, launch: dict[str, Any]) -> float:
    """What lies between the row tiles of the CTA with the most of them, and its last output.

    While one CTA is between two row tiles, the others on its SM go on.
    """
    further = max(launch["replayed"]["most_row_tiles"] - 1, 0)
    loads = load_cycles(machine, LATER_LOADS[launch["engine"]], LATER_NEAR_LOADS)
    stored = launch["m_tile"] * HEAD_DIM * 4 / machine.l2_bytes
    return further * (loads + stored / 2) / launch["ctas_per_sm"] + stored * launch["ctas_per_sm"]


def join_cycles(machine: Machine, launches: list[dict[str, Any]]) -> float:
    """CTAs for the parts of all row tiles that may be cut, if there is room; else each takes one after the other."""
    parts = math.ceil(max(x["m_tile"] for x in launches) * HEAD_DIM / JOIN_COLUMNS / JOIN_THREADS)
    at_once = JOIN_CTAS * machine.multiprocessors
    found = load_cycles(machine, JOIN_LOADS, JOIN_NEAR_LOADS)
    rounds = math.ceil(max(x["replayed"]["most_pieces"] for x in launches) / JOINED_AT_ONCE)
    turns = math.ceil(sum(x["cut_row_tiles"] for x in launches) * parts / at_once)
    read = sum(x["pieces"] * x["m_tile"] * (HEAD_DIM + 2) * 4 for x in launches)
    reading = read / machine.l2_bytes / machine.multiprocessors
    again = load_cycles(machine, 0, JOIN_NEAR_LOADS) * max(turns - 1, 0)  # where the next cut is
    return found + again + max(turns * load_cycles(machine, rounds, 0), reading)


def call_row(machine: Machine, tiles: dict[tuple[str, str], dict[str, Any]], call: Call, engine: str) -> dict[str, Any]:
    """tiles: those of tile_row(), by engine and instance."""
    launches = launches_of(machine, call, engine)
    begin = edges = main = 0.0
    for launch in launches:
        tile = tiles[tile_of(launch)]
        begin += begin_cycles(machine)
        main += main_cycles(machine, launch, tile)
        edges += edge_cycles(machine, launch)
    join = join_cycles(machine, launches)
    cycles = {"begin": begin, "main": main, "edges": edges, "join": join}
    parts = {name: value / machine.ghz / 1e3 for name, value in cycles.items()}
    parts["gaps"] = DEPENDENT_GAP_US * (len(launches) + 1)
    total, floor = sum(parts.values()), floor_us(machine, call, launches)
    cost = explain(**arguments_of(machine, call, engine), page_size=call.page_size)
    times = {"us": round(total, 1), "floor_us": round(floor, 1), "ratio": round(total / floor, 2)}
    schedule = {
        "launches": len(launches) + 1,
        "ctas": sum(x["ranges"] for x in launches),
        "balance": round(cost.balance, 3),
        "idle": cost.idle,
        "kv_reads": round(cost.kv_reads, 3),
        "pieces": sum(x["pieces"] for x in launches),
        "empty_pieces": sum(x["replayed"]["empty_pieces"] for x in launches),
    }
    parts_us = {name: round(us, 1) for name, us in parts.items()}
    return {"machine": machine.name, "call": call.name, "engine": engine, **times, **schedule, "parts_us": parts_us}


def floor_us(machine: Machine, call: Call, launches: list[dict[str, Any]]) -> float:
    """The longer of: K and V that some query sees once, q, out and page ids by the nominal bandwidth; the tensor cores'
    work on tiles with a visible key."""
    tokens = sum(call.query_lens)
    moved = sum(x["replayed"]["different"] for x in launches) * KV_TILE_BYTES
    moved += 2 * tokens * call.num_kv_heads * call.group * HEAD_DIM * BYTES
    for queries, keys in zip(call.query_lens, call.seq_lens, strict=True):
        seen = min(keys, call.window + queries - 1) if call.window else keys
        moved += 4 * math.ceil(seen / call.page_size)
    flops = sum(x["replayed"]["tiles"] * x["m_tile"] for x in launches) * KEYS * 4 * HEAD_DIM
    return max(moved / machine.memory_gb_per_s / 1e3, flops / TENSOR_FLOPS[machine.name] * 1e6)


def call_rows(machine: Machine, tiles: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each call with both engines, where they take different tiles; a call whose tiles are missing is left out.

    At page size 1 the kernel for wgmma copies in another way, which was not predicted. Raises ValueError for a machine
    whose L2 is not recorded here.
    """
    if machine.name not in L2_BYTES:
        raise ValueError(f"calls are predicted for {', '.join(L2_BYTES)}, not for {machine.name}")
    known = {(tile["engine"], tile["instance"]): tile for tile in tiles if tile["machine"] == machine.name}
    for call in CALLS:
        for engine in ("mma.sync", "wgmma"):
            launches = launches_of(machine, call, engine)
            has_tiles = all(tile_of(launch) in known for launch in launches)
            is_other = any(launch["engine"] == "wgmma" for launch in launches) and call.page_size > 1
            if has_tiles and (engine == "mma.sync" or is_other):
                yield call_row(machine, known, call, engine)


def call_line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {us}" for name, us in row["parts_us"].items())
    return (
        f"{row['call']:44} {row['engine']:8} {row['us']:7} us = {row['ratio']} x floor ({parts}); balance "
        f"{row['balance']}, {row['idle']} of {row['ctas']} CTAs idle, KV read {row['kv_reads']} x, {row['pieces']} "
        f"pieces, {row['empty_pieces']} without a key"
    )
