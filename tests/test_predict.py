"""The model that predicts the speed of compiled kernels: listings, loops, rates; and no kernel gets slower by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_predict  # noqa: E402
from sass_listing import bytes_of, decode_control, find_nvdisasm, parse, tensor_flops  # noqa: E402
from sass_loops import Flow  # noqa: E402
from sm_model import A100, H100, MACHINES, Machine  # noqa: E402
from sm_simulator import Simulator, steps_of  # noqa: E402

from pagedtree.cubin import cuda_library, extract_cubins, find_cuobjdump  # noqa: E402

GROWTH = 1.10
Line = str | tuple[str, int]


def control(stall: int = 1, sets: int = 7, reads: int = 7, waits: int = 0) -> int:
    return (stall | 1 << 4 | sets << 5 | reads << 8 | waits << 11) << 41


def listing(*lines: Line, name: str = "kernel") -> str:
    """What nvdisasm writes of (instruction, control code); other lines as they are."""
    out, address = [f"//--------------------- .text.{name}          --------------------------"], 0
    for line in lines:
        if isinstance(line, str):
            out.append(line)
            continue
        out.append(f"        /*{address:04x}*/                   {line[0]} ;   /* 0x0000000000000000 */")
        out.append(f"                                            /* 0x{line[1]:016x} */")
        address += 16
    return "\n".join(out)


def test_control_codes() -> None:
    # Of a move without scoreboards, a load that sets scoreboard 2, and an instruction that waits for it.
    assert decode_control(0x000FE400078E00FF) == {"stall": 2, "sets": None, "reads": None, "waits": ()}
    assert decode_control(0x000EA2000C1E1900) == {"stall": 1, "sets": 2, "reads": None, "waits": ()}
    assert decode_control(0x004FE40003F24070)["waits"] == (2,)


def test_a_listing() -> None:
    text = listing(
        '\t//## File "/a/mma.cuh", line 7 inlined at "/a/attend.cuh", line 9',
        '\t//## File "/a/attend.cuh", line 9',
        ".L_x_1:",
        ("HMMA.16816.F32.BF16 R4, R8.reuse, R2, R4", control(8)),
        ("@!P0 BRA `(.L_x_1)", control(5)),
        ("EXIT", control(5)),
    )
    first, second, third = parse(text)[0].instructions
    assert (first.opcode, first.stall) == ("HMMA.16816.F32.BF16", 8)
    assert first.lines == (("/a/mma.cuh", 7), ("/a/attend.cuh", 9))
    assert (second.predicate, second.target) == ("!P0", 0)
    assert first.where == "mma.cuh:7" and third.root == "EXIT"


def test_wrappers_are_not_told() -> None:
    lines = ('\t//## File "/a/ptx_cuda.cuh", line 7 inlined at "/a/attend.cuh", line 9',)
    text = listing(*lines, '\t//## File "/a/attend.cuh", line 9', ("NOP", control()))
    assert parse(text)[0].instructions[0].where == "attend.cuh:9"


def test_functions_end_at_the_next_section() -> None:
    text = listing(("NOP", control()), name="a") + "\n" + listing(("NOP", control()), ("EXIT", control()), name="b")
    assert [(f.name, len(f.instructions)) for f in parse(text)] == [("a", 1), ("b", 2)]


BRANCHES: list[Line] = [
    ".L_a:", ("ISETP.NE.AND P0, PT, R1, 0x2, PT", control(4)), ("@P0 BRA `(.L_b)", control(5)),
    ("FADD R1, R1, R1", control(4)), ("FADD R1, R1, R1", control(4)), ".L_b:", ("@P1 BRA `(.L_c)", control(5)),
    ("HMMA.16816.F32 R4, R8, R2, R4", control(8)), ".L_c:", ("@P2 BRA `(.L_a)", control(5)), ("EXIT", control(5)),
]  # fmt: skip


def test_an_iteration_takes_the_way_with_the_tensor_work() -> None:
    flow = Flow(parse(listing(*BRANCHES))[0])
    (loop,) = flow.loops()
    assert loop.head == 0
    assert [x.root for x in flow.path(loop)] == ["ISETP", "BRA", "BRA", "HMMA", "BRA"]
    assert [x.root for x in flow.main_path()] == ["ISETP", "BRA", "BRA", "HMMA", "BRA"]


def test_the_main_loop_is_the_inner_one() -> None:
    inner: list[Line] = [".L_b:", *[("HMMA.16816.F32 R4, R8, R2, R4", control(8))] * 4, ("@P0 BRA `(.L_b)", control(5))]
    text = listing(".L_a:", ("MOV R1, R2", control()), *inner, ("@P1 BRA `(.L_a)", control(5)), ("EXIT", control(5)))
    assert [x.root for x in Flow(parse(text)[0]).main_path()] == ["HMMA"] * 4 + ["BRA"]


def test_no_loop() -> None:
    assert Flow(parse(listing(("NOP", control()), ("EXIT", control(5))))[0]).main_path() == []


def test_flops_and_bytes() -> None:
    copy = parse(listing(("LDGSTS.E.BYPASS.128 [R1], [R2.64]", control())))[0].instructions[0]
    assert bytes_of(copy) == 512
    assert tensor_flops("HMMA.16816.F32.BF16") == 4096
    assert tensor_flops("HGMMA.64x128x16.F32") * 4 == 2 * 64 * 128 * 16
    assert tensor_flops("FADD") == 0


def cycles(machine: Machine, lines: list[Line], warps: int, source: str = "memory") -> float:
    flow = Flow(parse(listing(".L_a:", *lines, ("@P0 BRA `(.L_a)", control(5))))[0])
    steps = steps_of(machine, flow.path(flow.loops()[0]), None, source)
    return Simulator(machine, steps, warps, 1, 0, source).run(warm=5, rounds=14).cycles


def test_tensor_rate() -> None:
    def products(stall: int) -> list[Line]:
        return [("HMMA.16816.F32 R4, R8, R2, R4", control(stall))] * 32

    # Four warps in a sub-partition.
    assert cycles(A100, products(8), 16) == pytest.approx(32 * 8 * 4, rel=0.03)
    assert cycles(H100, products(6), 16) == pytest.approx(32 * 6 * 4, rel=0.03)


@pytest.mark.parametrize("source", ["memory", "l2"])
def test_copies_take_the_bandwidth(source: str) -> None:
    copy: list[Line] = [
        ("LDGSTS.E.BYPASS.128 [R1], [R2.64]", control(4)),
        ("LDGDEPBAR", control(1, sets=0)),
        ("DEPBAR.LE SB0, 0x2", control(4)),
    ]
    rate = 512 * 8 * 4 / cycles(A100, copy * 4, 8, source)
    assert rate == pytest.approx(A100.bytes_per_cycle(source), rel=0.1)


def test_a_chain_of_loads_takes_their_latency() -> None:
    chain: list[Line] = [
        ("LDSM.16.M88.4 R4, [R1]", control(2, sets=1)),
        ("MOV R1, R4", control(5, waits=0b10)),
    ] * 8
    assert 8 * 33 < cycles(A100, chain, 1) < 8 * 48


def test_a_barrier_waits_for_the_slowest_warp() -> None:
    work: list[Line] = [("MUFU.EX2 R1, R1", control(1, sets=1)), ("MOV R2, R1", control(5, waits=0b10))] * 4
    alone = cycles(A100, work, 8)
    together = cycles(A100, [*work, ("BAR.SYNC.DEFER_BLOCKING 0x0", control(5))], 8)
    assert together > alone + A100.barrier_latency / 2


def test_a_loop_that_cannot_go_on_is_told() -> None:
    steps = steps_of(A100, parse(listing(("MOV R2, R1", control(5, waits=0b10))))[0].instructions, None, "l2")
    simulator = Simulator(A100, steps, 1, 1, 0, "l2")
    simulator.warps[0].boards[1] = 1
    with pytest.raises(RuntimeError, match="no warp can go on"):
        simulator.run(1, 1)


# ---- the library of this build

LIBRARY = cuda_library()
with_library = [
    pytest.mark.skipif(LIBRARY is None, reason="built without CUDA"),
    pytest.mark.skipif(find_cuobjdump() is None or find_nvdisasm() is None, reason="no cuobjdump or nvdisasm here"),
]
RECORDED = [
    row for path in sorted(BENCHMARKS.glob("results/predicted*.json")) for row in json.loads(path.read_text())["rows"]
]
CORE = ("bf16-128-16", "bf16-128-128")


def predicted(tmp_path: Path, machine: Machine, wanted: list[str]) -> dict[str, dict[str, Any]]:
    assert LIBRARY is not None
    cubins = extract_cubins(LIBRARY, machine.architecture, tmp_path)
    if not cubins:
        pytest.skip(f"this build has no code for {machine.architecture}")
    return {name: bench_predict.look_at(machine, name, f, 0) for name, f in bench_predict.kernels_of(cubins, wanted)}


def grown(recorded: list[dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Instances whose cycles for a key and row of a tile have grown by more than a tenth."""
    return [
        f"{row['instance']} on {row['machine']}: {row['cycles']} cycles, now {now[row['instance']]['cycles']}"
        for row in recorded
        if now[row["instance"]]["cycles"] > GROWTH * row["cycles"]
    ]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("wanted", [CORE, pytest.param((), marks=pytest.mark.slow)], ids=["core", "all"])
class TestLibrary:
    pytestmark = with_library

    def test_no_kernel_gets_slower(self, tmp_path: Path, machine: Machine, wanted: tuple[str, ...]) -> None:
        recorded = [
            row for row in RECORDED if row["machine"] == machine.name and (not wanted or row["instance"] in wanted)
        ]
        if not recorded:
            pytest.skip("nothing recorded for this machine")
        now = predicted(tmp_path, machine, [row["instance"] for row in recorded])
        assert set(now) == {row["instance"] for row in recorded}
        assert grown(recorded, now) == []


def test_growth_would_be_found() -> None:
    recorded = [{"instance": "a", "machine": "m", "cycles": 100}]
    assert grown(recorded, {"a": {"cycles": 110}}) == [] and len(grown(recorded, {"a": {"cycles": 111}})) == 1


def test_names_of_instances() -> None:
    prefix = "_ZN9pagedtree4cuda16attention_kernelINS0_8InstanceI"
    assert bench_predict.instance_name(prefix + "13__nv_bfloat16S3_Li128ELi64EEEEEvNS") == "bf16-128-64"
    assert bench_predict.instance_name(prefix + "6__halfNS0_10Float8E4M3ELi64ELi16EEEEEvNS") == "fp16/fp8-64-16"
    assert bench_predict.instance_name("_ZN9pagedtree4cuda12merge_kernel") == ""


def test_without_the_tools(tmp_path: Path) -> None:
    """A refusal in words, not a traceback."""
    script = (
        "import sys; sys.argv = ['bench_predict.py']; import bench_predict; bench_predict.cuda_library = lambda: None"
    )
    command = [sys.executable, "-c", f"{script}; sys.exit(bench_predict.main())"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=BENCHMARKS)
    assert done.returncode == 2 and "no CUDA library" in done.stderr and "Traceback" not in done.stderr
