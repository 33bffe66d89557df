"""Bounds of warp-specialised kernels: the loops that are found, what is counted in them, what no loop is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import bench_predict
import predict_bounds
import predict_latent
import predict_peers
import pytest
import sass_roles
from predict_bounds import bound, busy_cycles, our_roles, with_keys
from sass_listing import Function, Instruction, bytes_of, find_nvdisasm, parse, tensor_flops
from sass_roles import Role, Roles, roles_of, waits
from sm_model import H200

from pagedtree.tools.cubin import cuda_library, extract_cubins, find_cuobjdump

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GROWTH = 1.10
RECORDED = BENCHMARKS / "results" / "wgmma_bounds_h200.json"


def listing(*lines: str) -> Function:
    """A kernel of such instructions; lines that begin with a dot are labels."""
    out, address = ["//--------------------- .text.kernel          --------------------------"], 0
    for line in lines:
        if line.startswith("."):
            out.append(line)
            continue
        out += [f"        /*{address:04x}*/                   {line} ;   /* 0x0000000000000000 */"]
        out += ["                                            /* 0x000fe200000001ff */"]
        address += 16
    return parse("\n".join(out))[0]


PRODUCERS = (
    ".L_p:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3", "@!P0 BRA `(.L_retry)",
    ".L_go:", "LDGSTS.E.BYPASS.128 [R4], desc[UR4][R6.64]", "ARRIVES.LDGSTSBAR.64 [UR4]", "@P1 BRA `(.L_seen)",
    "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "LD.E R8, desc[UR4][R6.64]", ".L_seen:", "STS [R4], R5", "@P2 BRA `(.L_p)",
)  # fmt: skip
CONSUMERS = (
    ".L_c:", "WARPGROUP.ARRIVE", "HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR4], RZ, !UPT",
    "HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR4].tnspB, R24, gsb0", "@P0 BRA `(.L_plain)",
    "FSEL R88, R88, -INF , P3", "FSEL R89, R89, -INF , P3", ".L_plain:", "MUFU.EX2 R88, R88", "@P1 BRA `(.L_same)",
    "FMUL R24, R24, R17.reuse", ".L_same:", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+URZ+0x2d8], RZ", "@P2 BRA `(.L_c)",
)  # fmt: skip
REST = ("EXIT", ".L_retry:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3", "@!P0 BRA `(.L_retry)", "BRA `(.L_go)")


def test_the_ways_through_an_invented_kernel() -> None:
    outer = (".L_outer:", *PRODUCERS, *CONSUMERS, "HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR4], R88")
    roles = roles_of(listing(*outer, "@P5 BRA `(.L_outer)", *REST), consumers=4, producers=4)
    plain = ["WARPGROUP", "HGMMA", "HGMMA", "BRA", "MUFU", "BRA", "SYNCS", "BRA"]
    assert [x.root for x in roles.consumers.path] == plain
    assert [x.root for x in roles.masked.path] == [*plain[:4], "FSEL", "FSEL", *plain[4:]]
    assert [x.root for x in roles.rescaled.path] == [*plain[:6], "FMUL", *plain[6:]]
    (producers,) = roles.producers
    assert [x.root for x in producers.path] == ["SYNCS", "BRA", "LDGSTS", "ARRIVES", "BRA", "STS", "BRA"]
    assert "BAR" in [x.root for x in roles.masked_producers.path]
    work = predict_bounds.work_of(roles)
    assert (work["wgmma"], work["others"], work["mask"], work["rescale"], work["producers_mask"]) == (2, 6, 2, 1, 2)
    assert work["producers_synchronise"]["mbarrier_waits"] == work["consumers_synchronise"]["mbarrier_arrivals"] == 1
    assert not work["always_rescales"]


BOXES = (
    ".L_p:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3", "@!P0 BRA `(.L_retry)", ".L_go:", "@P1 BRA `(.L_rows)",
    "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "@P2 BRA `(.L_end)", ".L_lane:", "ELECT P1, URZ, PT",
    "UTMALDG.4D [UR8], [UR42]", "@P0 BRA.U.ANY `(.L_lane)", "BRA `(.L_end)",
    ".L_rows:", "LDGSTS.E.BYPASS.128 [R4], desc[UR4][R6.64]", "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "STS [R4], R5",
    ".L_end:", "LD.E R8, desc[UR4][R6.64]", "@P2 BRA `(.L_p)",
)  # fmt: skip


def test_one_warp_starts_the_copies_by_tma_lane_after_lane() -> None:
    roles = roles_of(listing(*BOXES, *CONSUMERS, *REST), consumers=4, producers=4, boxes=8)
    first, others = roles.producers
    begin, end = ["SYNCS", "BRA", "BRA", "SYNCS", "BRA"], ["LD", "BRA"]
    assert [x.root for x in others.path] == begin + end and others.warps == 3
    counted = [x.root for x in first.path]
    assert counted[:5] == begin and counted[-2:] == end and counted.count("UTMALDG") == counted.count("ELECT") == 8
    assert [x.root for x in roles.masked_producers.path].count("LDGSTS") == 1
    shared = predict_bounds.copying_cycles(H200, roles, head_dim=128)["shared"]
    assert roles.has_tma and shared == pytest.approx(256 + 4)  # 32 KB, and a load of four warps


def test_a_look_at_an_mbarrier_is_not_left_out() -> None:
    look = (
        "@P6 BRA `(.L_ready)",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R3",
        "@!P0 BRA `(.L_retry)",
        ".L_ready:",
    )
    roles = roles_of(listing(*PRODUCERS, CONSUMERS[0], *look, *CONSUMERS[1:], *REST), consumers=4, producers=4)
    assert [x.root for x in roles.consumers.path][:4] == ["BRA", "SYNCS", "BRA", "WARPGROUP"]


@pytest.mark.parametrize(("lines", "message"), [(PRODUCERS, "multiplies"), (CONSUMERS, "copies")])
def test_a_kernel_without_one_of_the_loops(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roles_of(listing(*lines, *REST, ".L_go:"), consumers=4, producers=4)


def test_barriers_of_turns_are_not_left_out() -> None:
    turn = ("@P6 BRA `(.L_own)", "BAR.SYNC.DEFER_BLOCKING 0x2, 0x100", ".L_own:")
    roles = roles_of(listing(*PRODUCERS, CONSUMERS[0], *turn, *CONSUMERS[1:], *REST), consumers=8, producers=4)
    assert [x.root for x in roles.consumers.path][:3] == ["BRA", "BAR", "WARPGROUP"]
    assert "BAR" not in [x.root for x in roles.producers[0].path]


def test_a_stage_that_comes_in_parts() -> None:
    parts = (
        ".L_c:", "LDS R1, [R2]", ".L_part:", "@P4 BRA `(.L_seen)", "MEMBAR.ALL.CTA",
        ".L_seen:", "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR4], R88, gsb0", "@P0 BRA `(.L_part)",
        "HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0", *CONSUMERS[3:],
    )  # fmt: skip
    copied = (
        "NOP", ".L_p:", "LD.E R8, desc[UR4][R6.64]", ".L_rows:", "LDGSTS.E.BYPASS.128 [R4], desc[UR4][R6.64]",
        "@P3 BRA `(.L_x)", ".L_x:", "@P1 BRA `(.L_rows)", "@P2 BRA `(.L_p)",
    )  # fmt: skip
    roles = roles_of(listing(".L_outer:", *copied, *parts, "@P5 BRA `(.L_outer)", *REST[:1]), 8, 4, keys=128, trips=3)
    path = [x.root for x in roles.consumers.path]
    assert path[:11] == ["LDS", *["BRA", "HGMMA", "BRA"] * 3, "HGMMA"]
    assert [x.root for x in roles.producers[0].path] == ["LD", *["LDGSTS", "BRA", "BRA"] * 3, "BRA"]
    assert roles.consumers.count(sass_roles.multiplies) == 2  # four for 128 keys; the one without a result is none
    busy = busy_cycles(H200, [Role(roles.consumers.path, 4, keys=64)])
    assert busy["tensor"] == 3 * 32 + 64 and busy["issue"] == len(path)


def instruction(opcode: str, arguments: str = "", predicate: str = "") -> Instruction:
    return Instruction(0, predicate, opcode, arguments)


# Cycles of shared memory for four warps: the right operand once, the left one where it is in memory, copies.
@pytest.mark.parametrize(
    ("opcode", "arguments", "cycles"),
    [
        ("HGMMA.64x64x16.F32.BF16", "R88, R120, gdesc[UR4], R88", 16),
        ("HGMMA.64x64x16.F32.BF16", "R88, gdesc[UR4], R88", 32),
        ("HGMMA.64x256x16.F32.BF16", "R24, R120, gdesc[UR4].tnspB, R24", 64),
        ("QGMMA.64x64x32.F32.E4M3.E4M3", "R24, R120, gdesc[UR4], R24", 16),
        ("LDGSTS.E.BYPASS.128", "[R4], desc[UR4][R6.64]", 16),
        ("STS.128", "[R4], R8", 16),
        ("LDS", "R4, [R8]", 4),
        ("FADD", "R4, R4, R8", 0),
    ],
)
def test_cycles_of_shared_memory(opcode: str, arguments: str, cycles: float) -> None:
    assert busy_cycles(H200, [Role([instruction(opcode, arguments)], 4)])["shared"] == pytest.approx(cycles)


def test_loads_that_are_never_executed_cost_an_issue_slot() -> None:
    busy = busy_cycles(H200, [Role([instruction("LDS", "RZ, [RZ]", "!PT")], 4)])
    assert (busy["shared"], busy["issue"]) == (0, 1)


def test_cycles_of_the_schedulers() -> None:
    path = [instruction("HGMMA.64x128x16.F32.BF16", "R24, R8, gdesc[UR4], R24"), instruction("MUFU.EX2", "R4, R4")]
    assert busy_cycles(H200, [Role(path, 8)]) == {"issue": 4, "tensor": 128, "mufu": 16, "shared": pytest.approx(64)}
    assert busy_cycles(H200, [Role(path, 8, keys=128)])["tensor"] == 64


def test_row_tiles_share_the_memory_but_not_l2() -> None:
    alone, shared = (with_keys(H200, busy_cycles(H200, []), 32768, tiles) for tiles in (1, 2))
    assert alone["memory"] == pytest.approx(2 * shared["memory"], abs=0.1) and alone["l2"] == shared["l2"]
    assert bound(shared)["binds"] == "l2" and bound(alone)["binds"] == "memory"


def test_names_of_peers() -> None:
    name = (
        "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90"
        "ILi2EN4cute5tupleIJNS5_1CILi{}EENS6_IJNS7_ILi128EEE{}EEENS_10bfloat16_tEfNS_4arch4Sm90E{}EENS1_"
        "21CollectiveEpilogueFwdEEvNT_6ParamsE"
    )
    flags = re.sub(r"(\d)", r"Lb\1E", "10000011000")
    square, others = "SA_SA_", "NS7_ILi112EEENS7_ILi192EEE"
    alone, cluster = "1EEES8_S8_E", "2EEENS7_ILi1EEES9_E"

    def matching(*parts: Any) -> list[tuple[int, int]]:
        found = [peer for peer in predict_peers.PEERS if peer.pattern.fullmatch(name.format(*parts).encode())]
        return [(peer.head_dim, peer.keys) for peer in found]

    assert matching(alone, square, flags) == [(128, 128)]
    causal_and_local = flags.replace("Lb0E", "Lb1E", 1)
    for parts in ((cluster, square, flags), (alone, others, flags), (alone, square, causal_and_local)):
        assert matching(*parts) == []


# ---- the library of this build

LIBRARY = cuda_library()
with_library = [
    pytest.mark.skipif(LIBRARY is None, reason="built without CUDA"),
    pytest.mark.skipif(find_cuobjdump() is None or find_nvdisasm() is None, reason="no cuobjdump or nvdisasm here"),
]
CORE = ["bf16-64-128", "bf16/fp8-64-64"]
EVERY = [f"{dtypes}-{dim}-{rows}" for dtypes in ("bf16", "bf16/fp8") for dim in (64, 128, 256) for rows in (64, 128)]


def check_work(name: str, roles: Roles) -> None:
    """The products of 64 keys, and the bytes of their K and V."""
    dtypes, head_dim, rows = name.split("-")
    flops = sum(tensor_flops(x.opcode) for x in roles.consumers.path) * roles.consumers.warps
    assert flops == 2 * 2 * 64 * int(rows) * int(head_dim)
    is_fp8 = "fp8" in dtypes
    root = "LDG" if is_fp8 else "LDGSTS"
    by_rows = roles.masked_producers
    loaded = [bytes_of(x) for x in by_rows.path if x.root == root and ".128" in x.opcode]
    assert sum(loaded) * by_rows.warps == 2 * 64 * int(head_dim) * (1 if is_fp8 else 2)
    assert roles.has_tma != is_fp8 and sum(role.warps for role in roles.producers) == 4
    boxes = [x for x in roles.producers[0].path if x.root == "UTMALDG"]
    assert len(boxes) == (0 if is_fp8 else 2 * int(head_dim) // 64 * 4)  # 64 columns of 16 keys
    for role in (roles.consumers, roles.masked, roles.rescaled):
        assert len([x for x in role.path if waits(x)]) == 2  # for K and for V


@pytest.mark.parametrize("names", [CORE, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["core", "all"])
class TestLibrary:
    pytestmark = with_library

    def test_loops_and_their_growth(self, tmp_path: Path, names: list[str]) -> None:
        assert LIBRARY is not None
        cubins = extract_cubins(LIBRARY, "sm_90", tmp_path)
        functions = dict(bench_predict.kernels_of(cubins, names, "wgmma"))
        if not functions:
            pytest.skip("this build has no code for sm_90a")
        recorded = {
            f"{row['dtypes']}-{row['head_dim']}-{row['tile']}": row["work"]
            for row in json.loads(RECORDED.read_text())["rows"]
            if row.get("kernel") == "wgmma" and "work" in row
        }
        assert set(functions) == set(names)
        for name, function in functions.items():
            _, head_dim, rows = name.split("-")
            roles = our_roles(function, int(rows) // 16, int(head_dim))
            check_work(name, roles)
            work = predict_bounds.work_of(roles)
            grown = [key for key in ("others", "mask", "producers") if work[key] > GROWTH * recorded[name][key]]
            assert grown == [], f"{name}: more instructions than recorded"


@with_library[0]
@with_library[1]
def test_latent_rows(tmp_path: Path) -> None:
    """The products of 64 keys, the bytes of their rows, and no more instructions than recorded."""
    assert LIBRARY is not None
    cubins = extract_cubins(LIBRARY, "sm_90", tmp_path)
    functions = bench_predict.kernels_of_engines(cubins, ["bf16-576x512-64", "bf16-576x512-32"])
    if ("wgmma", "bf16-576x512-64") not in functions:
        pytest.skip("this build has no code for sm_90a")
    roles = predict_latent.our_latent_roles(functions["wgmma", "bf16-576x512-64"])
    flops = [sum(tensor_flops(x.opcode) for x in role.path if sass_roles.multiplies(x)) for role in roles.groups]
    assert [4 * of_warp for of_warp in flops] == [64 * 64 * 2 * (576 + 2 * 256)] * 2  # scores of 64 keys, half of 128
    assert sum(x.root == "UTMALDG" for x in roles.producers[0].path) == 576 // 64 * 4  # boxes of 64 columns of 16 keys
    found = [*predict_latent.latent_rows(H200, functions)]
    mma = next(row for row in found if row["kernel"] == "mma.sync")
    assert mma["cycles"]["tensor"] == H200.hmma * 2 * 64 * 32 * (576 + 512) // tensor_flops("HMMA.16816.F32") // 4
    recorded = [row for row in json.loads(RECORDED.read_text())["rows"] if "head_dim_v" in row]
    work, before = (next(row["work"] for row in rows if row["kernel"] == "wgmma") for rows in (found, recorded))
    grown = [key for key in ("others", "mask_tree", "producers") if work[key] > GROWTH * before[key]]
    assert grown == []
    assert 1.0 < work["tree_ratio"] <= 1.02
