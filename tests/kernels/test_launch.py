"""What launches ask of the CUDA runtime, counted by one without a GPU (tests/runtime); which drivers are refused."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "tests" / "runtime"
KB = 1024


class Asked(NamedTuple):
    """What the runtime was asked so far, and the answer of the last command."""

    launches: int
    set_attributes: int
    read_attributes: int
    device_attributes: int
    said: str


Run = Callable[..., list[Asked]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("runtime") / "launches"
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{RUNTIME}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *options, str(RUNTIME / "launches.cpp"), "-o", str(program)], check=True)

    def commands(*lines: str) -> list[Asked]:
        words = [word for line in lines for word in line.split()]
        printed = subprocess.check_output([str(program), *words], text=True, timeout=60)
        rows = [line.split(",", 4) for line in printed.splitlines()]
        return [Asked(*map(int, row[:4]), row[4]) for row in rows]

    return commands


def sets(asked: list[Asked]) -> list[int]:
    """How many attributes each command set; none of them failed."""
    assert all(after.said == "" for after in asked), asked
    totals = [0, *(after.set_attributes for after in asked)]
    return [after - before for before, after in pairwise(totals)]


def test_attributes_are_set_once_for_each_kernel(run: Run) -> None:
    """Two of them: the shared memory, and how much of it the L1 cache leaves."""
    large = f"launch a {100 * KB}"
    asked = run(large, large, f"launch b {100 * KB}", large, f"launch a {64 * KB}", f"launch a {48 * KB}")
    assert sets(asked) == [2, 0, 2, 0, 0, 0]
    assert asked[-1].launches == 6


def test_more_shared_memory_is_asked_for_again(run: Run) -> None:
    asked = run(*(f"launch a {kilobytes * KB}" for kilobytes in (64, 100, 64, 227, 100, 227)))
    assert sets(asked) == [2, 2, 0, 2, 0, 0]


def test_each_device_has_attributes_of_its_own(run: Run) -> None:
    large = f"launch a {100 * KB}"
    asked = run("device 0", large, "device 1", large, "device 0", large, "device 1", large)
    assert [after.said for after in asked] == ["132", "", "133", "", "132", "", "133", ""]
    assert [after.set_attributes for after in asked] == [0, 2, 2, 4, 4, 4, 4, 4]
    assert [after.device_attributes for after in asked[::2]] == [4, 8, 8, 8]
    assert asked[-1].launches == 4


def test_a_refusal_is_told_and_not_remembered(run: Run) -> None:
    asked = run(f"launch a {228 * KB}", f"launch a {228 * KB}", f"launch a {100 * KB}")
    assert asked[0].said == asked[1].said == "CUDA: launch of kernel: invalid argument"
    assert [after.launches for after in asked] == [0, 0, 1]
    assert [after.set_attributes for after in asked] == [1, 2, 4]


def test_threads_launch_the_same_kernel(run: Run) -> None:
    """Each gets the memory that it needs, whichever of them comes first."""
    for _ in range(20):
        (asked,) = run(f"threads 14 {16 * KB}")
        assert asked.said == "" and asked.launches == 14
        assert 2 <= asked.set_attributes <= 2 * 11  # only those with more than 48 KB ask


def test_what_is_known_of_a_kernel_is_read_once(run: Run) -> None:
    """Clusters and early starts ask which code runs; the most CTAs of a cluster are found by three attributes."""
    asked = run("behind a 0", "behind a 0", "cluster a", "cluster a", f"launch a {200 * KB}", "behind b 0")
    assert [after.read_attributes for after in asked] == [1, 1, 1, 1, 1, 2]
    assert [after.set_attributes for after in asked] == [0, 0, 2, 2, 4, 4]
    assert [after.said for after in asked] == ["", "", "16", "16", "", ""]


def test_what_comes_again_is_made_once(run: Run) -> None:
    """As the tensor maps of caches are: another shape at the same address is made anew. What is kept is bounded."""
    asked = run("latest 8 1", "latest 8 1", "latest 16 1", "latest 8 1", "latest 8 2", "latest 16 1", "latest 8 1")
    assert [after.said for after in asked] == ["1 10", "1 10", "2 10", "2 10", "3 20", "3 10", "4 10"]
    asked = run(*(f"latest {i} {i}" for i in range(4097)), "latest 1 1", "latest 4096 4096")
    assert [after.said for after in asked[-2:]] == ["4098 10", "4098 40960"]


@pytest.mark.parametrize(
    ("driver", "built_with", "said"),
    [
        (12080, 13000, "the NVIDIA driver is for CUDA 12.8, but pagedtree is built with CUDA 13.0: update the driver to"
         " one for CUDA 13, or build pagedtree with nvcc of CUDA 12"),
        (12000, 12080, "the NVIDIA driver is for CUDA 12.0, but pagedtree's kernels take more than 4 KB of parameters:"
         " update the driver to one for CUDA 12.1 (R530) or later"),
        (12010, 12080, ""),
        (13000, 12080, ""),
        (13000, 13000, ""),
    ],
)  # fmt: skip
def test_which_drivers_are_too_old(run: Run, driver: int, built_with: int, said: str) -> None:
    assert run(f"driver {driver} {built_with}")[0].said == said
