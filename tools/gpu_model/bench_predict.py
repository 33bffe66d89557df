"""Predicts how fast compiled kernels run, from their machine code. Needs no GPU.

    python -m pagedtree bench predict [--machine h200 a100] [--instances bf16-128-16 ...] [--stalls 8] [--json FILE]
    python -m pagedtree bench predict --ops verification                       # the passes over a row of logits
    python -m pagedtree bench predict --ops recurrent                          # calls of tree_delta_rule
    python -m pagedtree bench predict --calls                                  # whole calls of tree_attention
    python -m pagedtree bench predict --ops calls [--instances expand_tree ...]     # and of the other ops
    python -m pagedtree bench predict --ops calls --loops expand_top_kernel DTypeE2 # what is in a kernel's loops
    python -m pagedtree bench predict --ops bounds [--published xformers-0.0.30-*.whl flashmla.cubin]   # for wgmma
    python -m pagedtree bench predict --source csrc/cuda/attention/bfloat16*.cu --machine a100 --stalls 8
    FLASHINFER_INCLUDE=FOLDER python -m pagedtree bench predict --flashinfer   # its kernel (see flashinfer_kernel.py)
    python -m pagedtree bench predict --published xformers-0.0.*.whl           # beside published speeds

A kernel's main loop is followed instruction by instruction on a model of a multiprocessor (sm_simulator.py): one
iteration takes a stage of keys past a tile of rows. KV comes from memory where a tile has up to 32 rows, as in
decoding, else from L2, as where many tiles read the same keys. What comes out is a prediction, not a measurement: it
leaves out clocks that fall under load, and bank conflicts but for those of atomic additions, and but for calls the
beginning and the end of a call. Instances of another dtype of 16 bits differ in nothing that the model knows.

--source compiles files for that machine with source lines, so that stalls are told by line; it needs nvcc, and so does
--flashinfer.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import measure
from predict_bounds import ideas, our_rows
from predict_calls import INSTANCES_OF_CALLS, call_line, call_rows, tile_rows
from predict_latent import flashmla_rows, latent_rows
from predict_loop import SHARED_BYTES, figures
from predict_ops import Kernels, merged, op_line, op_rows
from predict_peers import DECODING_ROWS, flashinfer_rows, peer_rows, published_rows
from predict_recurrent import recurrent_rows
from predict_verification import calls, verification_rows
from sass_listing import Function, disassemble
from sass_loops import Flow
from sm_model import MACHINES, Machine

import pagedtree as pt
from pagedtree.tools.cubin import cuda_library, extract_cubins

ROOT = Path(__file__).resolve().parents[2]
OF_INSTANCE = r"I(13__nv_bfloat16|6__half)(S\d_|NS0_10Float8E4M3E)Li(\d+)ELi(\d+)ELi(\d+)E"
OPS = ("attention", "verification", "recurrent", "bounds", "calls")
INSTANCES = {  # by the engine that multiplies
    "mma.sync": re.compile(rf"attention_kernelINS0_8Instance{OF_INSTANCE}"),
    "wgmma": re.compile(rf"attention_sm90_kernelINS0_12Sm90Instance{OF_INSTANCE}"),
}


def instance_name(mangled: str, engine: str = "mma.sync") -> str:
    """ "bf16-128-16": dtypes, head size, rows of a tile; "bf16/fp8-192x128-16": with an fp8 cache, K's and V's head
    sizes; "": another kernel.
    """
    match = INSTANCES[engine].search(mangled)
    if not match:
        return ""
    q = "bf16" if "bfloat16" in match[1] else "fp16"
    head_dim = match[3] if match[5] == match[3] else f"{match[3]}x{match[5]}"
    return f"{q}{'/fp8' if 'Float8' in match[2] else ''}-{head_dim}-{match[4]}"


def kernels_of(cubins: list[Path], wanted: list[str], engine: str = "mma.sync") -> Iterator[tuple[str, Function]]:
    """(name, function) of the instances wanted (empty: all of bf16), in the order of their code."""
    for cubin in cubins:
        for function in disassemble(cubin, lambda symbol: is_wanted(instance_name(symbol, engine), wanted)):
            yield instance_name(function.name, engine), function


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
    dtypes, head_dims, rows = name.split("-")
    head_dim, _, head_dim_v = head_dims.partition("x")
    tile = pt.explain(
        [int(rows)], [4096], num_q_heads=1, num_kv_heads=1, head_dim=int(head_dim),
        head_dim_v=int(head_dim_v or head_dim), page_size=16, kv_bytes=1 if "fp8" in dtypes else 2,
        num_sms=machine.multiprocessors, max_shared_bytes=SHARED_BYTES[machine.architecture],
    ).launches[0]  # fmt: skip
    of_loop = figures(
        machine, Flow(function).main_path(), warps=tile.row_warps * tile.key_warps * tile.column_warps,
        ctas=tile.ctas_per_sm, source="memory" if int(rows) <= DECODING_ROWS else "l2",
        groups_under_way=max(tile.stages - 2, 0), num_stalls=num_stalls,
    )  # fmt: skip
    return {"machine": machine.name, "instance": name, "stages": tile.stages, **of_loop}


def kernels_of_engines(cubins: list[Path], wanted: list[str]) -> dict[tuple[str, str], Function]:
    """By engine and name."""
    engines = (*INSTANCES,)
    return {(engine, name): function for engine in engines for name, function in kernels_of(cubins, wanted, engine)}


def line_of_bounds(row: dict[str, Any]) -> str:
    """The time of a tile for 64 keys and each unit's share of it."""
    shares = sorted(row["share"].items(), key=lambda item: -item[1])
    if "idea" in row:
        of = f"{row['idea']}, {row['instance']}"
    else:
        of = f"{row['kernel']}, {row['dtypes']}-{row['head_dim']}, {row['rows']} rows, {row['tiles']} x {row['tile']}"
    return f"{of}: {row['time']} cycles; {', '.join(f'{unit} {share:.0%}' for unit, share in shares)}"


def line(row: dict[str, Any]) -> str:
    if "share" in row:
        return line_of_bounds(row)
    if "call" in row:
        return call_line(row) if "engine" in row else op_line(row)
    if "l2" in row:
        return f"{row['machine']:16} {row['instance']:32} {row['l2']} cycles of a KV tile from L2, by CTAs of an SM"
    if "floor_us" in row:
        times = f"chain {row['chain_us']:6} us, tree {row['tree_us']:6} us, floor {row['floor_us']:6} us"
        return f"{row['machine']:16} {row['instance']:32} {times}"
    name = f"{row['instance']} {row.get('mask', '')}".strip()
    text = f"{row['machine']:16} {name:32} {row['cycles']:6} cycles"
    if "tflop_per_s" in row:
        text += f", {row['tflop_per_s']:5.0f} TFLOP/s"
    if row.get("memory_share"):
        text += f", {row['memory_share']:.0%} of the memory's bandwidth"
    if "published" in row:
        text += f", published {row['published']}: {row['error']:+.0%}"
    text += f"; busiest: {row['binds']} {row['busy'][row['binds']]:.0%}"
    for stall in row["stalls"]:
        text += f"\n{'':24}{stall['cycles']:6} cycles  {stall['reason']}, {stall['instruction']} {stall['line']}"
    return text


def cubins_for(machine: Machine, sources: list[Path] | None, folder: Path) -> list[Path]:
    """The machine code of the library, or of the sources. Raises FileNotFoundError without a library."""
    if sources:
        architecture = machine.architecture + ("a" if machine.architecture == "sm_90" else "")
        return [compile_with_lines(source, architecture, folder) for source in sources]
    library = cuda_library()
    if library is None:
        raise FileNotFoundError("this build has no CUDA library")
    cubins = extract_cubins(library, machine.architecture, folder)
    if not cubins:
        print(f"{machine.name}: the library has no code for {machine.architecture}", file=sys.stderr)
    return cubins


def rows_of(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    if args.published and args.ops != "bounds":
        yield from published_rows(args.published, folder, args.stalls)
        return
    for machine in (MACHINES[name] for name in args.machine):
        if args.flashinfer:
            yield from flashinfer_rows(machine, folder, args.stalls)
        elif args.calls:
            functions = kernels_of_engines(cubins_for(machine, args.source, folder), [*INSTANCES_OF_CALLS])
            tiles = list(tile_rows(machine, functions))
            yield from tiles
            yield from call_rows(machine, tiles)
        elif args.ops == "bounds":
            functions = kernels_of_engines(cubins_for(machine, args.source, folder), args.instances)
            yield from our_rows(machine, functions)
            yield from peer_rows(machine, args.published or [], folder)
            yield from ideas(machine, functions)
            yield from latent_rows(machine, functions)
            yield from flashmla_rows(machine, args.published or [])
        elif args.ops == "verification":
            cubins = cubins_for(machine, args.source, folder)
            yield from verification_rows(machine, cubins, args.instances, args.stalls)
        elif args.ops == "calls":
            yield from op_rows(machine, cubins_for(machine, args.source, folder), args.instances)
        elif args.ops == "recurrent":
            yield from recurrent_rows(machine, cubins_for(machine, args.source, folder))
        else:
            for name, function in kernels_of(cubins_for(machine, args.source, folder), args.instances):
                yield look_at(machine, name, function, args.stalls)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", nargs="+", choices=[*MACHINES], default=["h200"])
    parser.add_argument("--ops", choices=[*OPS], default="attention")
    parser.add_argument(
        "--instances", nargs="+", default=[], metavar="NAME",
        help="as bf16/fp8-128-64, 'walk: peak', or parts of the names of calls; default bf16's, all calls",
    )  # fmt: skip
    parser.add_argument("--source", type=Path, nargs="+", metavar="FILE", help="of csrc/cuda, to compile")
    parser.add_argument("--calls", action="store_true", help="whole calls of tree_attention instead")
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer's paged prefill kernel instead")
    parser.add_argument(
        "--published", type=Path, nargs="+", metavar="FILE",
        help="wheels, libraries or cubins with kernels of which speeds are published; of bounds: with "
        "FlashAttention-3, FlashMLA",
    )  # fmt: skip
    parser.add_argument("--stalls", type=int, default=0, metavar="N", help="the N longest waits of each loop")
    parser.add_argument(
        "--loops", nargs="+", metavar="PART", help="lists the loops of the kernel with these in its name"
    )
    parser.add_argument("--json", type=Path, help="where to write the rows")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.loops:
                cubins = cubins_for(MACHINES[args.machine[0]], args.source, Path(folder))
                print(Kernels(cubins)(*args.loops).listing())
                return 0
            for row in rows_of(args, Path(folder)):
                print(line(row), flush=True)
                rows.append(row)
        except (FileNotFoundError, LookupError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
    if not rows:
        print("no kernel of these was found", file=sys.stderr)
        return 1
    result: dict[str, Any] = {"predicted": True, "commit": measure.commit(), "rows": rows}
    if args.calls:
        result["tiles"] = [row for row in rows if "l2" in row]
        result["rows"] = [row for row in rows if "call" in row]
    if args.ops == "calls" and args.json:
        result = {"predicted": True, "rows": merged(rows, args.json, measure.commit())}
    if args.ops == "verification" and not args.instances:
        result["calls"] = [call for name in args.machine for call in calls(MACHINES[name], rows)]
        for call in result["calls"]:
            print(
                f"{call['machine']:16} {call['call']}, in reads of all logits: {call['all_rows']}, lazy {call['lazy']}"
            )
    if args.json:
        measure.write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
