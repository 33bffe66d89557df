"""Every row of `python -m pagedtree check` on each CPU ISA and simt; on a GPU the command itself runs."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from pagedtree import _C
from pagedtree.check.case import CPU, Case, Place, equal
from pagedtree.check.cases import all_cases
from pagedtree.check.runner import OK, run_row
from pagedtree.testing import backends

SIMT = Place(torch.device("cpu"), "simt")
CASES = {case.name: case for case in all_cases(CPU) if isinstance(case, Case)}


def names(backend: str) -> list[str]:
    return [case.name for case in CASES.values() if case.backends is None or backend in case.backends]


# Rows of shards that simt leaves to the CPU: other numbers of ranks; options and filters of one op of the two.
LEFT_TO_CPU = r"/(one rank|four ranks)|shards/(options, verify_rejection/(?!everything)|rejection/.*joint)"


def in_core_suite(name: str, backend: str = "simt") -> bool:
    """Selects one of two cases that differ only in the dtype, another one on each backend."""
    other = re.sub("bf16|fp16", lambda dtype: "fp16" if dtype[0] == "bf16" else "bf16", name)
    twins = sorted({name, other} & {*CASES})
    is_chosen = name == twins[(zlib.crc32(twins[0].encode()) + (backend == "cpu")) % len(twins)]
    return is_chosen and (backend == "cpu" or re.search(LEFT_TO_CPU, name) is None)


def of_backend(backend: str) -> list[Any]:
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(name, marks=marks[in_core_suite(name, backend)]) for name in names(backend)]


@pytest.mark.parametrize("name", of_backend("cpu"))
def test_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    case = replace(case, loops=case.loops and cache(case.loops))  # shared by the instruction sets
    for isa in _C.available_isas():
        is_compared_with = isa == "portable" and case.loops is None
        if is_compared_with or (isa.startswith("amx") and "attention" not in case.group):  # AMX's only use
            continue
        monkeypatch.setenv("PAGEDTREE_CPU_ISA", isa)
        row = run_row(case, CPU)
        assert row.status == OK, f"{isa}: {row.detail}"


@pytest.mark.skipif("simt" not in backends(), reason="built without simt")
@pytest.mark.parametrize("name", of_backend("simt"))
def test_simt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", "random:7")
    row = run_row(CASES[name], SIMT)
    assert row.status == OK, row.detail


LONG = [name for name in names("simt") if re.search(r"V \d{5}", name)]
# Duplicates: a rule's second row, or a row that the same code reads.
TWINS = r"(on/(iid|onehot)|block/iid|traversal/swor)/(on chip/)?hostile|/plain|medusa_propose/(chain|root|paths)|/fp16"


@pytest.mark.skipif("simt" not in backends(), reason="built without simt")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if re.search(TWINS, name) else []) for name in LONG]
)
def test_clusters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of up to 16 CTAs equal one CTA; the last one has fewer tokens."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "192:227:16")
    monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", "reverse")
    row = run_row(CASES[name], SIMT)
    assert row.status == OK, row.detail


@pytest.mark.parametrize("group", sorted({case.group for case in CASES.values()}))
def test_threads(group: str) -> None:
    """Results have the same bits for any number of threads."""
    threads = torch.get_num_threads()
    try:
        for name in names("cpu"):
            if CASES[name].group == group and in_core_suite(name):
                torch.set_num_threads(1)
                expected = CASES[name].run(CPU)
                torch.set_num_threads(3)
                for key, found in CASES[name].run(CPU).items():
                    assert equal(found, expected[key]) == "", (name, key)
    finally:
        torch.set_num_threads(threads)
