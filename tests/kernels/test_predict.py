"""The model that predicts the speed of compiled kernels: listings, loops, rates; and no kernel gets slower by it."""

from __future__ import annotations

import json
import random
import struct
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import bank_conflicts
import bench_predict
import predict_peers
import predict_verification
import pytest
from predict_loop import ctas_that_fit, registers_of
from sass_case import Line, listing
from sass_listing import bytes_of, decode_control, find_nvdisasm, parse, tensor_flops
from sass_loops import Flow
from sm_model import A100, H100, MACHINES, Machine
from sm_simulator import Simulator, steps_of

from pagedtree.tools.cubin import cuda_library, extract_cubins, find_cuobjdump

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GROWTH = 1.10


def control(stall: int = 1, sets: int = 7, reads: int = 7, waits: int = 0) -> int:
    return (stall | 1 << 4 | sets << 5 | reads << 8 | waits << 11) << 41


def test_control_codes() -> None:
    # A move without scoreboards, a load that sets scoreboard 2, and an instruction that waits for it.
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


def test_code_behind_the_kernel_that_jumps_back_is_no_loop() -> None:
    """Where lanes have parted a vote before sm_90 is in other code, which nothing that is known leads to."""
    vote: list[Line] = [("BRA.DIV ~URZ, `(.L_vote)", control(5)), ("VOTE.ANY P1, P1", control(4)), ".L_voted:"]
    lines: list[Line] = [".L_a:", *vote, ("FADD R1, R1, R1", control(4)), ("@P0 BRA `(.L_a)", control(5))]
    lines += [("EXIT", control(5)), ".L_vote:", ("MOV R1, R2", control()), ("BRA `(.L_voted)", control(5))]
    assert [loop.head for loop in Flow(parse(listing(*lines))[0]).loops()] == [0]


def test_no_loop() -> None:
    assert Flow(parse(listing(("NOP", control()), ("EXIT", control(5))))[0]).main_path() == []


NESTED: list[Line] = [
    ".L_a:", ("MOV R1, R2", control()), ".L_b:", ("IADD3 R1, R1, R2, RZ", control()), ".L_c:",
    ("FADD R1, R1, R1", control()), ("@P0 BRA `(.L_c)", control(5)), ("@P1 BRA `(.L_b)", control(5)),
    ("@P2 BRA `(.L_a)", control(5)), ("EXIT", control(5)),
]  # fmt: skip


def test_loops_inside_are_unrolled() -> None:
    flow = Flow(parse(listing(*NESTED))[0])
    path = flow.unrolled(flow.loops()[0], (3, 2))
    assert [sum(x.root == root for x in path) for root in ("MOV", "IADD3", "FADD")] == [1, 3, 6]
    for trips in ((), (3,), (3, 2, 2)):
        with pytest.raises(ValueError, match=f"expected {len(trips)} levels"):
            flow.unrolled(flow.loops()[0], trips)


def test_what_fits_on_a_multiprocessor() -> None:
    (function,) = parse(listing(("IMAD.WIDE R4, R88, 0x8, UR90", control()), ("EXIT", control(5))))
    assert registers_of(function) == 89
    assert ctas_that_fit(H100, 128, 170, 0) == 2  # 170 registers are 176
    assert ctas_that_fit(H100, 128, 168, 0) == 3
    assert ctas_that_fit(H100, 128, 100, 113 * 1024) == 2 and ctas_that_fit(H100, 128, 100, 113 * 1024 + 1) == 1


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


def test_lanes_wait_for_a_bank() -> None:
    lanes = range(32)
    assert bank_conflicts.passes_of(lanes, merges=True) == 1
    assert bank_conflicts.passes_of([7] * 32, merges=True) == 1 and bank_conflicts.passes_of([7] * 32, False) == 32
    assert bank_conflicts.passes_of([2 * lane for lane in lanes], merges=True) == 2
    assert bank_conflicts.mean_passes(lambda lane, bits: lane, merges=True) == 1


def test_passes_of_random_banks() -> None:
    """The fullest of 32 banks has 3.5 of 32 lanes in the mean where each bank is equally likely."""
    chosen = random.Random(1)
    words = [[chosen.randrange(32) for _ in range(32)] for _ in range(4000)]
    expected = sum(bank_conflicts.passes_of(warp, False) for warp in words) / len(words)
    assert bank_conflicts.mean_passes(lambda lane, bits: bits, merges=False) == pytest.approx(expected, rel=0.05)


def test_an_atomic_takes_its_passes() -> None:
    add: list[Line] = [("ATOMS.POPC.INC.32 RZ, [R1]", control(2))] * 32
    for passes in (2.0, 4.0):
        machine = replace(H100, atomic_passes=passes)
        assert cycles(machine, add, 16) == pytest.approx(32 * 16 * passes * machine.atomic_cycles, rel=0.05)


# ---- the library of this build

LIBRARY = cuda_library()
with_library = [
    pytest.mark.skipif(LIBRARY is None, reason="built without CUDA"),
    pytest.mark.skipif(find_cuobjdump() is None or find_nvdisasm() is None, reason="no cuobjdump or nvdisasm here"),
]
CORE = {
    "predicted": ("bf16-128-16", "bf16-128-128"),
    "verification_predicted": ("draw_rows: peak", "draw_rows: peak and counts", "draw_rows: race, no noise"),
}


def recorded_for(kind: str, machine: Machine) -> list[dict[str, Any]]:
    files = sorted(BENCHMARKS.glob(f"results/{kind}*.json"))
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    return [row for row in rows if row["machine"] == machine.name]


def predicted(tmp_path: Path, kind: str, machine: Machine, wanted: list[str]) -> dict[str, dict[str, Any]]:
    assert LIBRARY is not None
    cubins = extract_cubins(LIBRARY, machine.architecture, tmp_path)
    if not cubins:
        pytest.skip(f"this build has no code for {machine.architecture}")
    if kind == "verification_predicted":
        rows = predict_verification.verification_rows(machine, cubins, wanted, 0)
        return {row["instance"]: row for row in rows}
    return {name: bench_predict.look_at(machine, name, f, 0) for name, f in bench_predict.kernels_of(cubins, wanted)}


def grown(recorded: list[dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Instances whose cycles for a key and row of a tile have grown by more than a tenth."""
    return [
        f"{row['instance']} on {row['machine']}: {row['cycles']} cycles, now {now[row['instance']]['cycles']}"
        for row in recorded
        if now[row["instance"]]["cycles"] > GROWTH * row["cycles"]
    ]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("kind", CORE)
@pytest.mark.parametrize("core", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["core", "all"])
class TestLibrary:
    pytestmark = with_library

    def test_no_kernel_gets_slower(self, tmp_path: Path, machine: Machine, kind: str, core: bool) -> None:
        recorded = [row for row in recorded_for(kind, machine) if not core or row["instance"] in CORE[kind]]
        if not recorded:
            pytest.skip("nothing recorded for this machine")
        now = predicted(tmp_path, kind, machine, [row["instance"] for row in recorded])
        assert set(now) == {row["instance"] for row in recorded}
        assert grown(recorded, now) == []


def test_growth_would_be_found() -> None:
    recorded = [{"instance": "a", "machine": "m", "cycles": 100}]
    assert grown(recorded, {"a": {"cycles": 110}}) == [] and len(grown(recorded, {"a": {"cycles": 111}})) == 1


def test_names_of_instances() -> None:
    prefix = "_ZN9pagedtree4cuda16attention_kernelINS0_8InstanceI"
    assert bench_predict.instance_name(prefix + "13__nv_bfloat16S3_Li128ELi64ELi128EEEEEvNS") == "bf16-128-64"
    assert (
        bench_predict.instance_name(prefix + "6__halfNS0_10Float8E4M3ELi192ELi32ELi128EEEEEvNS")
        == "fp16/fp8-192x128-32"
    )
    assert bench_predict.instance_name("_ZN9pagedtree4cuda12merge_kernel") == ""


# ---- kernels of others


@pytest.mark.parametrize(
    ("machine", "rows", "kv_bytes", "keys"),
    [(H100, 16, 2, 128), (H100, 64, 2, 128), (H100, 128, 2, 64), (H100, 16, 1, 256), (A100, 64, 1, 128)],
)
def test_tiles_of_flashinfer(machine: Machine, rows: int, kv_bytes: int, keys: int) -> None:
    """Two CTAs fit; with twice the keys they would not, unless the dispatcher has no larger tile."""
    tile = predict_peers.flashinfer_tile(machine, rows, kv_bytes)
    assert tile.keys == keys
    assert 2 * (tile.shared_bytes + 1024) <= predict_peers.SHARED_BYTES[machine.architecture] + 1024


def test_names_of_flashinfer() -> None:
    name = "_ZN10flashinfer34BatchPrefillWithPagedKVCacheKernelILb1ENS_12KernelTraitsILNS_8MaskModeE2E"
    name += "Lj64ELj1ELj8ELj8ELj8E"
    match = predict_peers.FLASHINFER.search(name)
    assert match and (predict_peers.MASKS[match[1]], match[2], match[4]) == ("custom", "64", "8")


def test_flashinfer_decodes_no_more_than_the_tile() -> None:
    """64 keys are four blocks; the fifth, which nvcc makes, is not entered."""
    blocks: list[Line] = []
    for _ in range(5):
        blocks += [*[("STS.128 [R1], R4", control())] * 2, *[("PRMT R4, R5, 0x1, R6", control())] * 60]
        blocks += [("@P1 BRA `(.L_end)", control(5))]
    lines = [".L_a:", ("@P0 BRA `(.L_end)", control(5)), *blocks, ".L_end:"]
    lines += [("HMMA.16816.F32 R4, R8, R2, R4", control(8)), ("@P2 BRA `(.L_a)", control(5)), ("EXIT", control(5))]
    path = predict_peers.flashinfer_path(Flow(parse(listing(*lines))[0]), keys=64)
    assert sum(x.root == "STS" for x in path) == 8 and sum(x.root == "HMMA" for x in path) == 1


def elf(architecture: int, text: bytes) -> bytes:
    """As much of a cubin as device_code() looks at, with a table of one section at its end."""
    end = 64 + len(text)
    header = b"\x7fELF\x02\x01\x01\x33".ljust(32, b"\0") + struct.pack("<QQI", 0, end, 0x500500 | architecture)
    return (header + struct.pack("<5H", 64, 56, 0, 64, 1)).ljust(64, b"\0") + text + bytes(64)


def test_machine_code_in_a_wheel(tmp_path: Path) -> None:
    first, second = elf(80, b"one"), elf(90, b"another")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/_C.so", b"\x7fELF of the host" + first + b"between" + second + b"after")
        wheel.writestr("a/text.py", first)
    (library,) = predict_peers.libraries_in(tmp_path / "a.whl")
    assert list(predict_peers.device_code(library)) == [("sm_80", first), ("sm_90", second)]


def test_names_of_published_kernels() -> None:
    traits = "Li128ELi128ELi64ELi4ELb0ELb0EN7cutlass10bfloat16_tE19Flash_kernel_traitsILi128ELi128ELi64ELi4ES2_EE"
    name = "_Z16flash_fwd_kernelI23Flash_fwd_kernel_traitsI{}{}EEv16Flash_fwd_params"
    plain, causal = "Lb0ELb0ELb0ELb0ELb1ELb1ELb0E", "Lb0ELb1ELb0ELb0ELb1ELb1ELb0E"
    published = next(p for p in predict_peers.PUBLISHED if p.head_dim == 128)
    assert published.pattern.fullmatch(name.format(traits, plain).encode())
    assert not published.pattern.fullmatch(name.format(traits, causal).encode())

    name = (
        "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90"
        "ILi2EN4cute5tupleIJNS5_1CILi2EEENS7_ILi1EEES9_EEENS6_IJNS7_ILi128EEENS7_ILi176EEESB_EEENS_10bfloat16_tEfNS_4arch"
        "4Sm90E{}Lb0ELb0ELb0ELb0ELb0ELb1ELb1ELb0ELb0ELb0EEENS1_29StaticPersistentTileSchedulerILb0EEEEEEEEEvNT_6ParamsE"
    )
    matching = [p.head_dim for p in predict_peers.PUBLISHED if p.pattern.fullmatch(name.format("Lb0E").encode())]
    assert matching == [128]
    assert not any(p.pattern.fullmatch(name.format("Lb1E").encode()) for p in predict_peers.PUBLISHED)


# ---- passes of verification


def pass_lines(*work: Line, by_word: bool = False) -> list[Line]:
    """Four words of 16 bytes; one by one, then (unless `by_word`) four logits at a time, `work`. Unaligned rows
    load eight."""
    word: Line = ("LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", control(1, sets=0))
    shift: Line = ("SHF.R.U32 R4, R5, R6, R4", control())
    groups: list[Line] = [] if by_word else [("@P3 BRA `(.L_groups)", control(5))]
    return [
        ".L_a:", ("@P0 BRA `(.L_skewed)", control(5)), *[word] * 4, ("BRA `(.L_loaded)", control(5)),
        ".L_skewed:", *[word, word, *[shift] * 24] * 4, ".L_loaded:", ("@P6 BRA `(.L_out)", control(5)), ".L_words:",
        ("MOV R1, R2", control()), ".L_groups:",
        ("@P1 BRA `(.L_next)", control(5)), *work, ".L_next:", *groups,
        ("@P4 BRA `(.L_words)", control(5)), ".L_out:", ("@P5 BRA `(.L_a)", control(5)), ("EXIT", control(5)),
    ]  # fmt: skip


def test_passes_are_known_by_what_they_do() -> None:
    counts: Line = ("ATOMS.ADD RZ, [R1], R2", control())
    noise: list[Line] = [("IMAD.WIDE.U32 R4, R5, -0x2daee0ad, RZ", control()), ("@P2 BRA `(.L_next)", control(5))]
    for work, kind in (([counts] * 8, "counts"), ([*noise, ("MUFU.LG2 R4, R4", control())], "race")):
        flow = Flow(parse(listing(*pass_lines(*work, by_word=True)))[0])
        loops = predict_verification.row_loops(flow)
        assert [*loops] == [kind]
        for name, of_pass in predict_verification.PASSES.items():
            if of_pass.loop != kind:
                continue
            path, words = predict_verification.path_of(flow, loops[kind], of_pass)
            done = [predict_verification.does(x) for x in path]
            assert (words, done.count("word"), done.count("logarithm")) == (4, 4, 0), name
            times = 8 if of_pass.does == "atomic" else 1  # in a word
            assert done.count(of_pass.does or "atomic") == (4 * times * of_pass.levels if of_pass.does else 0), name


def test_a_pass_of_another_shape_is_told() -> None:
    lines = pass_lines(*[("ATOMS.ADD RZ, [R1], R2", control())] * 8, by_word=False)
    flow = Flow(parse(listing(*lines))[0])
    with pytest.raises(ValueError, match="expected 1 levels of loops inside, found 0"):
        predict_verification.path_of(
            flow, predict_verification.row_loops(flow)["counts"], predict_verification.PASSES["peak and counts"]
        )


def test_reads_of_a_call() -> None:
    """Passes as long as the read are one read each; nine rows of 64 are read where the walk alone reads."""
    read = 4096 / H100.bytes_per_cycle("memory")
    rows = [
        {
            "machine": H100.name, "kernel": kernel, "pass": name, "cycles": read, "iteration": 8 * read, "words": 4,
            "warps": 16, "source": "l2",
        }
        for kernel in ("draw_rows", "walk")
        for name in predict_verification.PASSES
    ]  # fmt: skip
    found = {call["call"]: call for call in predict_verification.calls(H100, rows)}
    # Passes with a race take longer by what an H200 waited and dispatched, 23 % of the time; flat rows by 34 %.
    assert found["greedy"]["all_rows"] == [1, 1] and found["top-p"]["all_rows"] == [2.6, 3.03]
    assert 9 / 64 < found["greedy"]["lazy"][0] < 1.3 * 9 / 64


def test_without_the_tools(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal in words, not a traceback."""
    monkeypatch.setattr(bench_predict, "cuda_library", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench_predict.py"])
    assert bench_predict.main() == 2
    assert "no CUDA library" in capsys.readouterr().err
