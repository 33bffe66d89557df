"""`python -m pagedtree check`: CUDA instructions equal golden vectors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedtree.check.case import Case, Place
from pagedtree.check.cases import attention, instructions, instructions_sm90
from pagedtree.check.runner import FAILED, NOT_APPLICABLE, OK, run_row
from pagedtree.testing import backends

ROOT = Path(__file__).resolve().parents[2]
SIMT = Place(torch.device("cpu"), "simt")
pytestmark = pytest.mark.skipif("simt" not in backends(), reason="built without simt")


@pytest.mark.parametrize(
    ("family", "suffix", "some"),
    [
        (instructions, "", {"ldmatrix_x4", "cp_async_wait", "shared", "of_cta", "ex2"}),
        (instructions_sm90, "_sm90", {"mbar_init", "tma_load_5d", "matrix_descriptor", "wgmma_rs", "setmaxnreg_dec"}),
    ],
    ids=["all GPUs", "Hopper"],
)
def test_every_instruction_has_golden_vectors(family, suffix, some):
    cuda = ROOT / "csrc" / "cuda"
    wrappers = (cuda / "tile" / f"ptx{suffix}_cuda.cuh").read_text()
    functions = set(re.findall(r"^PT_DEVICE [\w&*<> ]+?[&* ](\w+)\(", wrappers, re.MULTILINE))
    assert some <= functions
    called = set(re.findall(r"ptx::(\w+)", (cuda / f"instructions{suffix}.cu").read_text()))
    assert functions - called == set()
    judged = {case.name.removeprefix("instructions/") for case in family.cases()}
    assert judged == set(instructions.instruction_names("simt", family.TABLE))


def test_a_wrong_answer_of_an_instruction_is_found(monkeypatch):
    cases = [case for family in (instructions, instructions_sm90) for case in family.cases()]
    right, answers = instructions.run_instruction, {}
    for case in cases:

        def wrong(which: str, words: Any, *arguments: Any, case: Case = case) -> Any:
            key = which, words.tobytes()
            answers[key] = answers[key] if key in answers else right(which, words, *arguments)
            found, cluster = answers[key]
            if f"instructions/{which}" == case.name:
                found = found.copy()
                found[-1, -1, -1] ^= 0x1000
            return found, cluster

        monkeypatch.setattr(instructions, "run_instruction", wrong)
        rows = [run_row(other, SIMT) for other in cases]
        assert [row.name for row in rows if row.status == FAILED] == [case.name]


def test_hopper_s_code_elsewhere_is_no_failure(monkeypatch):
    cases = [*instructions_sm90.cases(), attention.tile_case((64, 64), 64, "bf16", "", attention.WGMMA)]

    def outcomes(place: Place) -> set[tuple[str, str]]:
        return {(row.status, row.detail) for row in (run_row(case, place) for case in cases)}

    assert outcomes(SIMT) == {(OK, "")}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        elsewhere = Place(torch.device("cuda"), "simt")  # only its capability is queried
        assert outcomes(elsewhere) == {(NOT_APPLICABLE, "only on GPUs of compute capability 9.0")}
    monkeypatch.setattr(instructions, "library", lambda backend: object())
    assert outcomes(SIMT) == {(NOT_APPLICABLE, "this build has no code for 9.0a")}


def test_a_gpu_without_clusters_is_no_failure(monkeypatch):
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "4:227:1")
    rows = {row.name: row for row in (run_row(case, SIMT) for case in instructions.cases())}
    assert rows["instructions/of_cta"].status == NOT_APPLICABLE
    assert rows["instructions/of_cta"].detail == "this GPU has no clusters"
    assert {row.status for name, row in rows.items() if name != "instructions/of_cta"} == {OK}
