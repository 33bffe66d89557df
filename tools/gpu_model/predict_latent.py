"""Bounds of kernels for a latent cache, whose rows are keys and values at once: ours and FlashMLA's.

What predict_bounds.py says of bounds holds here too.

FlashMLA's machine code is compiled from its repository, for example, in csrc/, CUTLASS lying beside it:

    nvcc -cubin -O3 -std=c++20 -DNDEBUG --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda \
        -gencode arch=compute_90a,code=sm_90a -I. -Ikerutils/include -Ism90 -Icutlass/include \
        -o flashmla.cubin sm90/decode/dense/instantiations/bf16.cu
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from predict_bounds import PAGE_SIZE, ROWS, SHARED_RATE, SOFTMAX, bound, busy_cycles, synchronisation, with_keys
from predict_loop import SHARED_BYTES
from sass_listing import Function, Instruction, disassemble
from sass_loops import Flow, tensor_and_copies
from sass_roles import (
    KEYS,
    Kind,
    Role,
    around,
    columns_of,
    copies,
    inner_loops,
    looks_up,
    masks,
    multiplies,
    rescales_with,
    roles_of,
    shortest,
)
from sm_model import Machine

import pagedtree as pt

HEAD_DIM, HEAD_DIM_V = 576, 512
ROW_BYTES = HEAD_DIM * 2
FLOPS = 2 * KEYS * (HEAD_DIM + HEAD_DIM_V)  # of a row
TURN_KEYS = 2 * KEYS  # of an iteration of two groups of warps, which share its output
PARTS = 3  # of a stage
LENGTH = 4096  # keys of a sequence, of which the last iteration's are masked
FLASHMLA = re.compile(r"_ZN4sm90\w*flash_fwd_splitkv_mla_kernel\w+10bfloat16_t\w+")


@dataclass(frozen=True)
class LatentRoles:
    """Ways of the groups that multiply, of the warps that copy, of a group that scales the output, and where keys are
    masked, by causality or by a tree."""

    groups: Sequence[Role]
    producers: Sequence[Role] = ()
    rescaled: Role | None = None
    causal: Role | None = None
    tree: Role | None = None

    def mean(self, of_role: Callable[[Role], float]) -> float:
        """Averages over the warps that multiply."""
        return sum(of_role(role) * role.warps for role in self.groups) / sum(role.warps for role in self.groups)


def other(x: Instruction) -> bool:
    return not multiplies(x)


def our_latent_roles(function: Function) -> LatentRoles:
    """Both groups of four warps run one loop. The second group takes weights before it gives its own."""
    boxes = HEAD_DIM // 64 // PARTS * KEYS // PAGE_SIZE
    roles = roles_of(function, consumers=8, producers=4, keys=TURN_KEYS, boxes=boxes, trips=PARTS)
    flow = Flow(function)
    loops = [around(flow, loop) for loop in inner_loops(flow, multiplies)]

    def way(wanted: Kind | None, unwanted: Kind) -> Role:
        return Role(shortest(flow, loops, multiplies, wanted, unwanted, trips=PARTS), 8, TURN_KEYS)

    def hidden(x: Instruction) -> bool:
        """Finds what masked keys cost: the row's view, for which a division finds the token, and the copies' fences."""
        return masks(x) or x.root == "MEMBAR" or x.opcode == "MUFU.RCP"

    first = way(None, lambda x: x.opcode == "LDS.128")
    return LatentRoles(
        groups=(replace(roles.consumers, warps=4), replace(first, warps=4)),
        producers=tuple(replace(role, keys=KEYS) for role in roles.producers),
        rescaled=roles.rescaled,
        causal=way(hidden, looks_up),
        tree=way(lambda x: hidden(x) or x.root == "LD", lambda x: x.root == "LDG"),
    )


def flashmla_roles(function: Function) -> LatentRoles:
    """Each group has a loop of its own, and its first warp starts copies."""
    flow = Flow(function)
    groups = []
    for loop in inner_loops(flow, multiplies):
        groups.append(Role(shortest(flow, [loop], multiplies, copies), 1, TURN_KEYS))
        groups.append(Role(shortest(flow, [loop], multiplies, None, copies), 3, TURN_KEYS))
    return LatentRoles(groups)


def latent_work(roles: LatentRoles) -> dict[str, Any]:
    """Instructions of one warp for 64 keys as in predict_bounds.work_of(). tree_ratio: those of a sequence whose last
    iteration is masked by a tree, over those of a causal one."""
    first = roles.groups[0]
    plain = first.count(other)

    def scaled(role: Role) -> float:
        """By products in the registers of the output, which has more columns than the scores."""
        return role.count(rescales_with([x for x in role.path if columns_of(x) > KEYS]))

    work: dict[str, Any] = {
        "wgmma": roles.mean(lambda role: role.count(multiplies)),
        "others": round(roles.mean(lambda role: role.count(other)), 1),
        "softmax": roles.mean(lambda role: role.count(lambda x: x.root in SOFTMAX)),
        "rescale": roles.mean(scaled),
        "always_rescales": roles.rescaled is None,
        "producers": 0.0,
        "producer_warps": sum(role.warps for role in roles.producers),
        "consumers_synchronise": {
            key: round(roles.mean(lambda role, key=key: synchronisation(role)[key]), 1)  # type: ignore[misc]
            for key in synchronisation(first)
        },
        "opcodes": dict(Counter(x.root for x in first.path).most_common()),
    }
    if roles.rescaled and roles.causal and roles.tree:
        work["rescale"] = round(roles.rescaled.count(other) - plain, 1)
        work["producers"] = round(
            sum(role.count(other) * role.warps for role in roles.producers) / work["producer_warps"], 1
        )
        causal, tree = (role.count(other) for role in (roles.causal, roles.tree))
        work["mask_causal"], work["mask_tree"] = round(causal - plain, 1), round(tree - plain, 1)
        before = plain * (LENGTH // TURN_KEYS - 1)
        work["tree_ratio"] = round((before + tree) / (before + causal), 4)
    return work


def latent_row(
    machine: Machine, kernel: str, rows: int, tile: int, busy: Counter[str], work: dict[str, Any] | None
) -> dict[str, Any]:  # fmt: skip
    tiles = -(-rows // tile)
    found = bound(with_keys(machine, busy, KEYS * ROW_BYTES, tiles))
    per_second = machine.ghz * 1e9 * machine.multiprocessors / found["time"]
    return {
        "machine": machine.name, "kernel": kernel, "dtypes": "bf16", "head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM_V,
        "rows": rows, "tile": tile, "tiles": tiles, **found, "tflop_per_s": round(FLOPS * tile * per_second / 1e12),
        **({"work": work} if work else {}),
    }  # fmt: skip


def apart_from_values(x: Instruction) -> int:
    """A weight of ways through the kernel for mma.sync, which waits and copies again where V is a cache of its own."""
    return tensor_and_copies(x) - 100_000 * (x.root == "DEPBAR")


def copied_by_tma(busy: Counter[str]) -> Counter[str]:
    """With what TMA writes to shared memory."""
    return busy + Counter(shared=KEYS * ROW_BYTES // SHARED_RATE)


def latent_rows(machine: Machine, functions: dict[tuple[str, str], Function]) -> Iterator[dict[str, Any]]:
    """functions: as of predict_bounds.our_rows(). The first row of a kernel has its instructions too."""
    for engine in ("wgmma", "mma.sync"):
        tile = pt.explain(
            [64], [LENGTH], num_q_heads=1, num_kv_heads=1, head_dim=HEAD_DIM, head_dim_v=HEAD_DIM_V, latent=True,
            page_size=PAGE_SIZE, num_sms=machine.multiprocessors,
            max_shared_bytes=SHARED_BYTES[machine.architecture], engine=engine,
        ).launches[0]  # fmt: skip
        function = functions.get((engine, f"bf16-{HEAD_DIM}x{HEAD_DIM_V}-{tile.m_tile}"))
        if function is None:
            continue
        work = None
        if tile.engine == "wgmma":
            roles = our_latent_roles(function)
            work = latent_work(roles)
            busy = copied_by_tma(busy_cycles(machine, [*roles.groups, *roles.producers]))
        else:
            warps = tile.row_warps * tile.key_warps * tile.column_warps
            path = Flow(function).main_path(apart_from_values)
            busy = busy_cycles(machine, [Role(path, warps, tile.keys_per_stage)])
        for rows in ROWS:
            yield latent_row(machine, engine, rows, tile.m_tile, busy, work if rows == ROWS[0] else None)


def flashmla_rows(machine: Machine, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """FlashMLA's kernel, if one of the files is a cubin with it."""
    for file in files:
        if zipfile.is_zipfile(file) or b"flash_fwd_splitkv_mla_kernel" not in file.read_bytes():
            continue
        (function,) = disassemble(file, lambda name: bool(FLASHMLA.fullmatch(name)))
        roles = flashmla_roles(function)
        work, busy = latent_work(roles), copied_by_tma(busy_cycles(machine, roles.groups))
        for rows in ROWS:
            yield latent_row(machine, "FlashMLA", rows, 64, busy, work if rows == ROWS[0] else None)
