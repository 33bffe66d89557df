"""Kernels of others in the same model: FlashInfer's, compiled here, and those of which speeds are published."""

from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import flashinfer_kernel
from predict_bounds import bound, busy_cycles, copying_cycles, with_keys, work_of
from predict_loop import SHARED_BYTES, ctas_that_fit, figures, registers_of
from sass_listing import Instruction, disassemble
from sass_loops import Flow, tensor_and_copies
from sass_roles import KEYS, columns_of, multiplies, roles_of
from sm_model import MACHINES, Machine

DECODING_ROWS = 32  # a tile of more rows is one of many that read the same keys

# ---- FlashInfer

FLASHINFER = re.compile(r"BatchPrefillWithPagedKVCacheKernel.*MaskModeE(\d)ELj(\d+)ELj(\d+)ELj(\d+)E")
MASKS = {"1": "causal", "2": "custom"}
CACHES = {"bf16": ("nv_bfloat16", 2), "bf16/fp8": ("__nv_fp8_e4m3", 1)}  # names, bytes of an element
FLASHINFER_WARPS, FLASHINFER_CTAS = 4, 2  # of a CTA; on a multiprocessor, for which it plans


@dataclass(frozen=True)
class Tile:
    """A tile of FlashInfer: steps of 16 keys that a warp takes per iteration, keys that all take, bytes of a CTA."""

    steps: int
    keys: int
    shared_bytes: int


def flashinfer_tile(machine: Machine, rows: int, kv_bytes: int) -> Tile:
    """What its dispatcher chooses for head size 128: as many keys as fit when two CTAs share a multiprocessor."""
    head_dim, element = flashinfer_kernel.HEAD_DIM, 2
    row_warps = 4 if rows > 16 else 1
    fixed = rows * head_dim * element
    of_step = 16 * (FLASHINFER_WARPS // row_warps) * head_dim * 2 * kv_bytes
    if kv_bytes == 1 and rows > 16:  # room for the decoded keys or values
        of_step += 16 * head_dim * element
    fitting = ((SHARED_BYTES[machine.architecture] + 1024) // 2 - fixed) // of_step
    steps = min(fitting, 4 if rows > 64 else 8)
    steps = 1 << int(math.log2(steps))
    return Tile(steps, 16 * steps * (FLASHINFER_WARPS // row_warps), fixed + steps * of_step)


def flashinfer_path(flow: Flow, keys: int) -> list[Instruction]:
    """An iteration past `keys` keys.

    With an fp8 cache all threads first decode the keys, and later the values, in blocks that write 32 bytes each; nvcc
    makes a block more than are entered.
    """

    def writes(instruction: Instruction) -> bool:
        return instruction.root == "STS" and ".128" in instruction.opcode

    loop = flow.main_loop()
    surplus: set[int] = set()
    run = 0  # such blocks since the last one of another kind
    for block in (flow.blocks[head] for head in sorted(loop.body if loop else ())):
        run = run + 1 if any(map(writes, block)) else 0
        if run > keys * flashinfer_kernel.HEAD_DIM // (16 * 32 * FLASHINFER_WARPS):
            surplus.add(block[0].address)

    def weight(instruction: Instruction) -> int:
        return tensor_and_copies(instruction) + 40 * writes(instruction) - 3000 * (instruction.address in surplus)

    return flow.main_path(weight)


def flashinfer_rows(machine: Machine, folder: Path, num_stalls: int) -> Iterator[dict[str, Any]]:
    """Raises FileNotFoundError without headers (see flashinfer_kernel.py), CalledProcessError of nvcc."""
    architecture = machine.architecture + ("a" if machine.architecture == "sm_90" else "")
    for dtypes, (cached, kv_bytes) in CACHES.items():
        cubin = folder / f"flashinfer_{kv_bytes}.cubin"
        options = [*flashinfer_kernel.FLAGS, *flashinfer_kernel.includes(), f"-DFLASHINFER_KV={cached}"]
        command = ["nvcc", "-cubin", f"-arch={architecture}", *options, "-o", str(cubin)]
        subprocess.run([*command, str(flashinfer_kernel.SOURCE)], check=True)
        for function in disassemble(cubin):
            match = FLASHINFER.search(function.name)
            if not match:
                continue
            rows = int(match[2])
            tile = flashinfer_tile(machine, rows, kv_bytes)
            if int(match[4]) != tile.steps:
                continue
            fit = ctas_that_fit(machine, 32 * FLASHINFER_WARPS, registers_of(function), tile.shared_bytes)
            of_loop = figures(
                machine, flashinfer_path(Flow(function), tile.keys), warps=FLASHINFER_WARPS,
                ctas=min(fit, FLASHINFER_CTAS), source="memory" if rows <= DECODING_ROWS else "l2",
                num_stalls=num_stalls,
            )  # fmt: skip
            # The products of attention alone; the kernel also adds up the weights by tensor instructions.
            flops = 4 * rows * tile.keys * flashinfer_kernel.HEAD_DIM * of_loop["ctas"] * machine.multiprocessors
            of_loop["tflop_per_s"] = round(flops * machine.ghz / of_loop["cycles"] / 1000, 1)
            name = f"{dtypes}-{flashinfer_kernel.HEAD_DIM}-{rows}"
            yield {"machine": machine.name, "instance": name, "mask": MASKS[match[1]], "keys": tile.keys, **of_loop}


# ---- published figures


@dataclass(frozen=True)
class Published:
    """The speed of a kernel that somebody measured. warps: those of a CTA that multiply; pattern: matches its name."""

    kernel: str
    machine: str
    head_dim: int
    rows: int
    keys: int
    warps: int
    tflop_per_s: float
    where: str
    pattern: re.Pattern[bytes]

    @property
    def shared_bytes(self) -> int:
        return (self.rows + 2 * self.keys) * self.head_dim * 2


FA3_FIGURE = "FlashAttention-3 paper, figure 5, 16k keys, no mask"


def fa2(machine: str, head_dim: int, rows: int, keys: int, tflop_per_s: float, where: str = FA3_FIGURE) -> Published:
    """FlashAttention-2, four warps; neither mask nor dropout; whole tiles, where there is such a kernel."""
    traits = f"Li{head_dim}ELi{rows}ELi{keys}ELi4ELb0ELb0EN7cutlass10bfloat16_tE"
    flags = f"ELb0ELb0ELb0ELb0ELb{int(head_dim <= 128)}ELb1ELb0EE"
    pattern = re.compile(rf"_Z\d+flash_fwd_kernelI\w+{traits}\w+{flags}\w+".encode())
    kernel = "FlashAttention-2 2.5.6, forward"
    return Published(kernel, machine, head_dim, rows, keys, 4, tflop_per_s, where, pattern)


def fa3(head_dim: int, rows: int, keys: int, cluster: int, tflop_per_s: float) -> Published:
    """FlashAttention-3 by wgmma: a warpgroup for 64 rows, and one for copies, which the model leaves out."""
    tile = rf"1CILi{cluster}E\w+IJNS\w_ILi{rows}EEENS\w_ILi{keys}EEE\w+10bfloat16_t"
    flags = "4Sm90E" + "Lb0E" * 6 + "Lb1E" * 2 + "Lb0E" * 3
    pattern = re.compile(rf"_ZN\w+FlashAttnFwdSm90\w+{tile}\w+{flags}\w+StaticPersistentTileScheduler\w+".encode())
    kernel = "FlashAttention-3, forward"
    return Published(kernel, "h100", head_dim, rows, keys, rows // 16, tflop_per_s, FA3_FIGURE, pattern)


PUBLISHED = (
    fa2("a100", 128, 128, 64, 228, "FlashAttention-2 paper: up to 73 % of 312 TFLOP/s"),
    fa2("h100", 64, 128, 128, 324),
    fa2("h100", 128, 128, 64, 370),
    fa2("h100", 256, 64, 64, 326),
    fa3(64, 192, 128, 1, 497),
    fa3(128, 128, 176, 2, 648),
    fa3(256, 128, 80, 2, 756),
)


def device_code(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(architecture, cubin) of the uncompressed machine code in a library or a cubin; cuobjdump does not read all."""
    magic = b"\x7fELF\x02\x01\x01\x33"
    at = data.find(magic)
    while at >= 0:
        program, sections, flags = struct.unpack_from("<QQI", data, at + 32)
        sizes = struct.unpack_from("<4H", data, at + 54)  # of a program header and how many, likewise sections
        end = max(program + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
        yield f"sm_{flags & 0xFF}", data[at : at + end]
        at = data.find(magic, at + end)


def libraries_in(file: Path) -> Iterator[bytes]:
    """A file's bytes, or those of the libraries in a wheel."""
    if not zipfile.is_zipfile(file):
        yield file.read_bytes()
        return
    with zipfile.ZipFile(file) as wheel:
        yield from (wheel.read(name) for name in wheel.namelist() if name.endswith(".so"))


def published_rows(files: list[Path], folder: Path, num_stalls: int) -> Iterator[dict[str, Any]]:
    """Predictions for those kernels of PUBLISHED that the files have."""
    waiting = list(PUBLISHED)
    for data in (data for file in files for data in libraries_in(file)):
        for architecture, code in device_code(data):
            here = [p for p in waiting if MACHINES[p.machine].architecture == architecture and p.pattern.search(code)]
            if not here:
                continue
            cubin = folder / f"published.{architecture}.cubin"
            cubin.write_bytes(code)
            functions = disassemble(cubin)
            for published in here:
                waiting.remove(published)
                machine = MACHINES[published.machine]
                function = next(f for f in functions if published.pattern.fullmatch(f.name.encode()))
                fit = ctas_that_fit(machine, 32 * published.warps, registers_of(function), published.shared_bytes)
                of_loop = figures(
                    machine, Flow(function).main_path(), warps=published.warps, ctas=fit, source="l2",
                    num_stalls=num_stalls,
                )  # fmt: skip
                error = round(of_loop["tflop_per_s"] / published.tflop_per_s - 1, 3)
                yield {
                    "machine": machine.name, "instance": f"{published.kernel}-{published.head_dim}",
                    "kernel": published.kernel, "head_dim": published.head_dim,
                    "tile": [published.rows, published.keys], "published": published.tflop_per_s,
                    "where": published.where, "error": error, **of_loop,
                }  # fmt: skip


# ---- bounds of FlashAttention-3, as a wheel of xformers has it


@dataclass(frozen=True)
class Peer:
    """A kernel without clusters, variable lengths or pages. flags: causal, local; they too have a loop without mask."""

    head_dim: int
    rows: int
    keys: int
    flags: str = "00"

    @property
    def pattern(self) -> re.Pattern[bytes]:
        sizes = dict.fromkeys((self.rows, self.keys, self.head_dim))  # a size that repeats is abbreviated
        tile = "".join(rf"ILi{size}E(?:(?!ILi)\w)*?" for size in (1, *sizes))
        flags = "".join(f"Lb{flag}E" for flag in f"{self.flags}000011000")
        return re.compile(rf"_ZN\w+FlashAttnFwdSm90\w+1C{tile}10bfloat16_t\w+4Sm90E{flags}EE\w+".encode())


PEERS = (
    Peer(64, 192, 128),
    Peer(128, 128, 176),  # here and below at 80 keys of wgmma of 16 columns: the wheel was built without others
    Peer(128, 128, 128, "10"),
    Peer(256, 128, 80),
    Peer(256, 128, 64, "01"),
)


def peer_rows(machine: Machine, files: Sequence[Path], folder: Path) -> Iterator[dict[str, Any]]:
    """Bounds of those of PEERS that the files have, for two row tiles that read the same keys."""
    waiting = list(PEERS)
    for architecture, code in (one for file in files for data in libraries_in(file) for one in device_code(data)):
        here = [peer for peer in waiting if architecture == machine.architecture and peer.pattern.search(code)]
        if not here:
            continue
        cubin = folder / "peers.cubin"
        cubin.write_bytes(code)
        for peer in here:
            waiting.remove(peer)
            (function,) = disassemble(cubin, lambda name, peer=peer: bool(peer.pattern.fullmatch(name.encode())))
            roles = roles_of(function, peer.rows // 16, 1, peer.keys)
            # A copy has 64 columns of all keys of a stage; nvcc has unrolled the loop of the copies, not the other one.
            (role,) = roles.producers
            stages = sum(x.root == "UTMALDG" for x in role.path) * 64 // (2 * peer.head_dim)
            roles = replace(roles, producers=(replace(role, keys=peer.keys * stages),))
            busy = busy_cycles(machine, [roles.consumers]) + copying_cycles(machine, roles, peer.head_dim)
            kv_bytes = 2 * KEYS * peer.head_dim * 2
            yield {
                "machine": machine.name, "kernel": "FlashAttention-3", "dtypes": "bf16", "head_dim": peer.head_dim,
                "rows": 2 * peer.rows, "tile": peer.rows, "tiles": 2, "keys": peer.keys,
                "columns": sorted({columns_of(x) for x in roles.consumers.path if multiplies(x)}),
                **bound(with_keys(machine, busy, kv_bytes, 2)), "work": work_of(roles),
            }  # fmt: skip
