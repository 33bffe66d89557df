"""The model of whole calls of ops other than attention: its parts counted by hand; and no call gets worse by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import predict_ops
import pytest
from predict_ops import BARRIER, GAP_US, MEETING, Kernel, Kernels, Launch, OpCall, Phase, sorting, words_of
from sass_case import listing
from sass_listing import find_nvdisasm, parse
from sm_model import H200

from pagedtree.tools.cubin import cuda_library, extract_cubins, find_cuobjdump

RECORDED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "ops_predicted_h200.json"
GROWTH = 1.10
LIBRARY = cuda_library()
CORE = ("expand_tree, 8 nodes x 1", "ngram_propose, 8k tokens x 1", "rerank_tree", "tree_delta_rule, 16 nodes x 1")


def toy(*lines: tuple[str, int] | str) -> Kernel:
    """Lines are (instruction, control code without its upper bits) or labels."""
    coded = [line if isinstance(line, str) else (line[0], (line[1] | 0x7F << 4) << 41) for line in lines]
    (function,) = parse(listing(*coded, name="_Z3toy_kernelv"))
    return Kernel(function)


ADD, WORD, COUNT = ("IADD3 R1, R1, R2, RZ", 4), ("LDG.E.128 R4, [R2.64]", 4), ("ATOMS.POPC.INC.32 RZ, [R1]", 4)
NESTED = toy(
    ".L_a:",
    WORD,
    ("@P5 BRA `(.L_b)", 5),
    ".L_clean:",
    ("MUFU.EX2 R1, R1", 4),
    ("@P4 BRA `(.L_clean)", 5),
    ".L_b:",
    ("@P3 BRA `(.L_next)", 5),
    ".L_word:",
    ADD,
    ".L_four:",
    COUNT,
    ("@P0 BRA `(.L_four)", 5),
    ("@P1 BRA `(.L_word)", 5),
    ".L_next:",
    ("@P2 BRA `(.L_a)", 5),
    ("EXIT", 5),
)


def roots(kernel: Kernel, **wanted: object) -> list[str]:
    path = kernel.turn(kernel.loop(own={"LDG.E.128": 1}), **wanted)  # type: ignore[arg-type]
    return [x.root for x in path if x.root != "BRA"]


def test_a_turn_enters_what_it_likes() -> None:
    assert roots(NESTED) == ["LDG"]
    assert roots(NESTED, likes={"ATOMS": 100}, into={"ATOMS": (2, 3)}) == ["LDG", *["IADD3", *["ATOMS"] * 3] * 2]
    assert roots(NESTED, likes={"MUFU": 100}, into={"MUFU": (3,)}) == ["LDG", *["MUFU"] * 3]
    # The first beginning that a loop has decides; "" is one of each opcode.
    assert roots(NESTED, likes={"ATOMS": 100}, into={"MUFU": (), "": (1, 2)}) == ["LDG", "IADD3", "ATOMS", "ATOMS"]


def test_a_loop_that_cannot_be_avoided_is_told() -> None:
    kernel = toy(".L_a:", WORD, ".L_b:", ADD, ("@P0 BRA `(.L_b)", 5), ("@P1 BRA `(.L_a)", 5), ("EXIT", 5))
    with pytest.raises(ValueError, match="the loop at 0x10 is on the way through 0x0"):
        roots(kernel)


def test_loops_are_found_by_what_they_have() -> None:
    assert NESTED.loop(own={"ATOMS": 1}).body < NESTED.loop(own={"IADD3": 1}).body
    assert NESTED.loop(whole={"ATOMS": 1}, number=-1) == NESTED.loop(own={"ATOMS": 1})
    assert NESTED.loop(lacks=("ATOMS",)) == NESTED.loop(own={"MUFU": 1})
    for wanted in ({"number": 4}, {"own": {"ATOMS": 2}}):
        with pytest.raises(ValueError, match=r"_Z3toy_kernelv has \d loops with .*, none of number"):
            NESTED.loop(**wanted)  # type: ignore[arg-type]
    assert "IADD3" in NESTED.listing() and NESTED.short_name == "toy_kernel"


def test_a_phase_adds_up() -> None:
    load = H200.l2_latency + predict_ops.AROUND_A_LOAD
    far = H200.memory_latency + predict_ops.AROUND_A_LOAD
    near = predict_ops.L1_LATENCY + predict_ops.AROUND_A_LOAD
    phase = Phase("x", far=1, loads=2, near=3, barriers=4, meetings=5, cycles=7)
    assert phase.of_cta(H200, 8, 1) == far + 2 * load + 3 * near + 4 * BARRIER + 5 * MEETING + 7
    turn = predict_ops.turn_cycles(H200, (*NESTED.flow.main_path(),), 8, 1, "l2")
    assert Phase("y", NESTED.flow.main_path(), turns=2.5).of_cta(H200, 8, 1) == 2.5 * turn > 0


def us(cycles: float) -> float:
    return cycles / H200.ghz / 1e3


def launch(ctas: int, phases: Sequence[Phase] = (Phase("x", cycles=17550),), **others: float) -> Launch:
    return Launch(NESTED, ctas, 512, phases, **others)  # type: ignore[arg-type]


def test_ctas_come_in_waves() -> None:
    """Of 512 threads with few registers four CTAs fit on a multiprocessor, of 100 KB of shared memory two."""
    for ctas, shared, beside, waves in ((1, 0, 1, 1), (133, 0, 2, 1), (529, 0, 4, 2), (265, 100 << 10, 2, 2)):
        row = launch(ctas, shared_bytes=shared).row(H200)
        assert (row["beside"], row["waves"], row["us"]) == (beside, waves, waves * 10.0)


def test_phases_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="two phases of one name among x"):
        launch(1, [Phase("x", loads=1), Phase("x", loads=2)]).row(H200)


def test_bytes_take_the_bandwidth() -> None:
    """Of all multiprocessors that of memory, of one what L2 gives it."""
    moved = 100e6
    assert launch(132, moved=moved).row(H200)["us"] == pytest.approx(moved / (4800e3 * 0.9), abs=0.01)
    assert launch(1, moved=1e6).row(H200)["us"] == pytest.approx(us(1e6 / H200.l2_bytes), abs=0.01)


def test_a_call_has_gaps() -> None:
    call = OpCall("toy", lambda kernels: [launch(1), replace(launch(1), early=True)], moved=4800e3 * 0.9)
    row = call.row(H200, Kernels([]))
    assert row["us"] == pytest.approx(20 + GAP_US + predict_ops.DEPENDENT_GAP_US) and row["floor_us"] == 1.0
    assert row["ratio"] == pytest.approx(row["us"], abs=0.01)
    assert "toy" in predict_ops.op_line(row)


def test_turns_and_steps() -> None:
    assert words_of(128256, 512) == 8 and words_of(128256, 512, bytes_of_one=4) == 16 and words_of(8, 512) == 1
    assert sorting(8).barriers == 7 and sorting(1).barriers == 2


def test_rows_of_other_calls_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [OpCall(name, lambda kernels: [], 1.0) for name in ("a", "b", "c")]
    monkeypatch.setattr(predict_ops, "all_calls", lambda: calls)
    file = tmp_path / "rows.json"
    first = predict_ops.merged([{"call": "c", "us": 3}, {"call": "a", "us": 1}], file, "old")
    file.write_text(json.dumps({"rows": [*first, {"call": "gone", "us": 9}]}))
    found = predict_ops.merged([{"call": "b", "us": 2}, {"call": "a", "us": 4}], file, "new")
    assert [(row["call"], row["us"], row["commit"]) for row in found] == [
        ("a", 4, "new"),
        ("b", 2, "new"),
        ("c", 3, "old"),
    ]


@pytest.mark.skipif(LIBRARY is None, reason="built without CUDA")
@pytest.mark.skipif(find_cuobjdump() is None or find_nvdisasm() is None, reason="no cuobjdump or nvdisasm here")
@pytest.mark.parametrize("wanted", [CORE, pytest.param((), marks=pytest.mark.slow)], ids=["core", "all"])
def test_no_call_gets_worse(tmp_path: Path, wanted: tuple[str, ...]) -> None:
    assert LIBRARY is not None
    cubins = extract_cubins(LIBRARY, "sm_90", tmp_path)
    if not cubins:
        pytest.skip("this build has no code for sm_90")
    recorded = {row["call"]: row for row in json.loads(RECORDED.read_text())["rows"]}
    assert [*recorded] == [call.name for call in predict_ops.all_calls()], "record the calls anew: tools/README.md"
    found = {row["call"]: row["us"] for row in predict_ops.op_rows(H200, cubins, wanted)}
    chosen = [call for call in recorded if not wanted or any(part in call for part in wanted)]
    assert [*found] == chosen
    worse = [
        f"{call}: {found[call]} us, recorded {recorded[call]['us']}"
        for call in chosen
        if found[call] > recorded[call]["us"] * GROWTH
    ]
    assert worse == []
