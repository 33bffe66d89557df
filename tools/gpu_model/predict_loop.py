"""What the model of a multiprocessor says of one loop, as a row of a result."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sass_listing import Function, Instruction, bytes_of, tensor_flops
from sm_model import Machine
from sm_simulator import Prediction, predict

# The most that a CTA may use; a multiprocessor has 1 KB more.
SHARED_BYTES = {
    architecture: kilobytes * 1024
    for architecture, kilobytes in {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}.items()
}
REGISTERS = 65536  # per multiprocessor


def registers_of(function: Function) -> int:
    """The registers of a thread, as its code names them."""
    named = re.findall(r"\bR(\d+)", " ".join(instruction.arguments for instruction in function.instructions))
    return max(map(int, named), default=0) + 1


def ctas_that_fit(machine: Machine, threads: int, registers: int, shared_bytes: int) -> int:
    """CTAs on a multiprocessor at the same time; each takes 1 KB of shared memory more than it asks for."""
    by_registers = REGISTERS // (threads * math.ceil(registers / 8) * 8)
    return min(by_registers, (SHARED_BYTES[machine.architecture] + 1024) // (shared_bytes + 1024))


def figures(
    machine: Machine, path: Sequence[Instruction], *, warps: int, ctas: int, source: str,
    groups_under_way: int | None = None, num_stalls: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """One iteration of all warps. memory_share: part of the nominal bandwidth, where keys come from memory."""
    found = predict(machine, path, warps=warps, ctas=ctas, source=source, groups_under_way=groups_under_way)
    per_second = machine.ghz * 1e9 * machine.multiprocessors * ctas / found.cycles * warps
    copied = sum(bytes_of(instruction) for instruction in path if instruction.root == "LDGSTS") * per_second
    return {
        "source": source, "instructions": len(path), "warps": warps, "ctas": ctas, "cycles": round(found.cycles),
        "tflop_per_s": round(sum(tensor_flops(x.opcode) for x in path) * per_second / 1e12, 1),
        "memory_share": round(copied / machine.memory_gb_per_s / 1e9, 3) if source == "memory" else None,
        "binds": max(found.busy, key=lambda unit: found.busy[unit]),
        "busy": {unit: round(share, 3) for unit, share in sorted(found.busy.items())},
        "stalls": stalls_of(found, num_stalls),
    }  # fmt: skip


def stalls_of(found: Prediction, count: int) -> list[dict[str, Any]]:
    """Where a warp waits longest: cycles per iteration, the reason, instruction and source line."""
    places: Counter[tuple[str, str, str]] = Counter()
    for (instruction, reason), cycles in found.stalls.items():
        if reason != "not selected":
            places[reason, instruction.root, instruction.where] += cycles
    keys = ("reason", "instruction", "line")
    return [dict(zip(keys, place, strict=True), cycles=round(cycles)) for place, cycles in places.most_common(count)]
