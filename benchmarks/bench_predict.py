"""Predicts how fast the attention kernels run, from the machine code in the library. Needs no GPU.

    python -m pagedtree bench predict [--machine h200 a100] [--instances bf16-128-16 ...] [--stalls 8] [--json FILE]
    python -m pagedtree bench predict --source csrc/cuda/tree_attention/bfloat16*.cu --machine a100 --stalls 8

A kernel's main loop is followed instruction by instruction on a model of a multiprocessor (sm_simulator.py): one
iteration takes a stage of keys past a tile of rows. KV comes from memory where a tile has up to 32 rows, as in
decoding, else from L2, as where many tiles read the same keys. What comes out is a prediction, not a measurement: it
leaves out the beginning and the end of a call, clocks that fall under load, and bank conflicts. Instances of another
dtype of 16 bits differ in nothing that the model knows.

--source compiles files for that machine with source lines, so that stalls are told by line; it needs nvcc.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
from sass_listing import Function, bytes_of, disassemble, tensor_flops
from sass_loops import Flow
from sm_model import MACHINES, Machine
from sm_simulator import Prediction, predict

import pagedtree as pt
from pagedtree.cubin import cuda_library, extract_cubins

ROOT = Path(__file__).resolve().parents[1]
INSTANCE = re.compile(
    r"attention_kernelINS0_8InstanceI(13__nv_bfloat16|6__half)(S\d_|NS0_10Float8E4M3E)Li(\d+)ELi(\d+)E"
)
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
DECODING_ROWS = 32  # a tile of more rows is one of many that read the same keys


def instance_name(mangled: str) -> str:
    """ "bf16-128-16": dtypes, head size, rows of a tile; "bf16/fp8-128-16": with an fp8 cache; "": another kernel."""
    match = INSTANCE.search(mangled)
    if not match:
        return ""
    q = "bf16" if "bfloat16" in match[1] else "fp16"
    return f"{q}{'/fp8' if 'Float8' in match[2] else ''}-{match[3]}-{match[4]}"


def kernels_of(cubins: list[Path], wanted: list[str]) -> Iterator[tuple[str, Function]]:
    """(name, function) of the instances wanted (empty: all of bf16), in the order of their code."""
    for cubin in cubins:
        names = {instance_name(match.group()) for match in INSTANCE.finditer(cubin.read_bytes().decode("latin-1"))}
        if not any(is_wanted(name, wanted) for name in names):
            continue
        for function in disassemble(cubin):
            name = instance_name(function.name)
            if is_wanted(name, wanted):
                yield name, function


def is_wanted(name: str, wanted: list[str]) -> bool:
    return name in wanted if wanted else name.startswith("bf16")


def compile_with_lines(source: Path, architecture: str, folder: Path) -> Path:
    """The cubin of a file of csrc/cuda, with source lines."""
    cubin = folder / f"{source.stem}.cubin"
    options = ["-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-lineinfo", "-I", str(ROOT / "csrc")]
    command = ["nvcc", "-cubin", f"-arch={architecture}", *options, "-o", str(cubin), str(source)]
    subprocess.run(command, check=True)
    return cubin


def look_at(machine: Machine, name: str, function: Function, num_stalls: int) -> dict[str, Any]:
    """A row of the result."""
    dtypes, head_dim, rows = name.split("-")
    tile = pt.explain(
        [int(rows)], [4096], num_q_heads=1, num_kv_heads=1, head_dim=int(head_dim), page_size=16,
        kv_bytes=1 if "fp8" in dtypes else 2, num_sms=machine.multiprocessors,
        max_shared_bytes=SHARED_BYTES[machine.architecture],
    ).launches[0]  # fmt: skip
    warps, source = tile.row_warps * tile.key_warps, "memory" if int(rows) <= DECODING_ROWS else "l2"
    path = Flow(function).main_path()
    found = predict(
        machine, path, warps=warps, ctas=tile.ctas_per_sm, source=source, groups_under_way=max(tile.stages - 2, 0)
    )
    per_second = machine.ghz * 1e9 * machine.multiprocessors * tile.ctas_per_sm / found.cycles * warps
    copied = sum(bytes_of(instruction) for instruction in path if instruction.root == "LDGSTS") * per_second
    binds = max(found.busy, key=lambda unit: found.busy[unit])
    return {
        "machine": machine.name, "instance": name, "source": source, "instructions": len(path),
        "warps": warps, "ctas": tile.ctas_per_sm, "stages": tile.stages, "cycles": round(found.cycles),
        "tflop_per_s": round(sum(tensor_flops(x.opcode) for x in path) * per_second / 1e12, 1),
        "memory_share": round(copied / machine.memory_gb_per_s / 1e9, 3) if source == "memory" else None,
        "binds": binds, "busy": {unit: round(share, 3) for unit, share in sorted(found.busy.items())},
        "stalls": stalls_of(found, num_stalls),
    }  # fmt: skip


def stalls_of(found: Prediction, count: int) -> list[dict[str, Any]]:
    """Where a warp waits longest: cycles an iteration, the reason, instruction and source line."""
    places: Counter[tuple[str, str, str]] = Counter()
    for (instruction, reason), cycles in found.stalls.items():
        if reason != "not selected":
            places[reason, instruction.root, instruction.where] += cycles
    keys = ("reason", "instruction", "line")
    return [dict(zip(keys, place, strict=True), cycles=round(cycles)) for place, cycles in places.most_common(count)]


def line(row: dict[str, Any]) -> str:
    share = "" if row["memory_share"] is None else f", {row['memory_share']:.0%} of the memory's bandwidth"
    text = (
        f"{row['machine']:16} {row['instance']:18} {row['cycles']:6} cycles, {row['tflop_per_s']:5.0f} TFLOP/s{share}"
    )
    text += f"; busiest: {row['binds']} {row['busy'][row['binds']]:.0%}"
    for stall in row["stalls"]:
        text += f"\n{'':24}{stall['cycles']:6} cycles  {stall['reason']}, {stall['instruction']} {stall['line']}"
    return text


def rows_of(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    library = cuda_library()
    for machine in (MACHINES[name] for name in args.machine):
        if args.source:
            architecture = machine.architecture + ("a" if machine.architecture == "sm_90" else "")
            cubins = [compile_with_lines(source, architecture, folder) for source in args.source]
        elif library is None:
            raise FileNotFoundError("this build has no CUDA library")
        else:
            cubins = extract_cubins(library, machine.architecture, folder)
            if not cubins:
                print(f"{machine.name}: the library has no code for {machine.architecture}", file=sys.stderr)
        for name, function in kernels_of(cubins, args.instances):
            yield look_at(machine, name, function, args.stalls)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", nargs="+", choices=[*MACHINES], default=["h200"])
    parser.add_argument("--instances", nargs="+", default=[], metavar="NAME", help="as bf16/fp8-128-64; default bf16's")
    parser.add_argument(
        "--source", type=Path, nargs="+", metavar="FILE", help="of csrc/cuda/tree_attention, to compile"
    )
    parser.add_argument("--stalls", type=int, default=0, metavar="N", help="the N longest waits of each loop")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in rows_of(args, Path(folder)):
                print(line(row), flush=True)
                rows.append(row)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 2
    if args.json:
        measure.write_json(args.json, {"predicted": True, "commit": measure.commit(), "rows": rows})
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
