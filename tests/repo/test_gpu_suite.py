"""`benchmarks/gpu_suite.sh` from its first stage to its last, on a CPU: simt in the GPU's place, stubs for its tools.

What a stage's failure, hang or death does to the others is tested in a copy whose Python only pretends to work.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagedtree.testing import backends

ROOT = Path(__file__).resolve().parents[2]
SUITE = Path("benchmarks") / "gpu_suite.sh"
STAGES = {
    "headline": ["machine", "install", "check", "flashinfer", "headline"],
    "tests": ["op_tests", "captures"],
    "sanitizers": ["memcheck", "racecheck", "synccheck"],
    "attention": ["attention"],
    "others": ["others"],
}
ALL_STAGES = [name for names in STAGES.values() for name in names]
MOST_FILES = 8
PART_SECONDS = 600

TOOLS = {
    "nvidia-smi": "echo 'name, driver_version'; echo 'a GPU that is not there, 0'",
    "compute-sanitizer": 'echo "arguments: $*"',
}


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def environment(folder: Path, **more: str) -> dict[str, str]:
    for name, text in TOOLS.items():
        executable(folder / "tools" / name, text)
    (folder / "tmp").mkdir(exist_ok=True)
    found = {**os.environ, "PATH": f"{folder / 'tools'}:{os.environ['PATH']}", "TMPDIR": str(folder / "tmp"), **more}
    for name in ("WHEEL", "STAGE_SECONDS", "COMMIT", "FLASHINFER_INCLUDE"):
        found.pop(name, None) if name not in more else None
    return found


@dataclass
class Outcome:
    status: int
    said: str
    out: Path

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.out.iterdir())

    @property
    def stages(self) -> dict[str, dict[str, object]]:
        (path,) = self.out.glob("stages_*.json")
        return json.loads(path.read_text())["stages"]

    def log(self, name: str) -> str:
        (path,) = self.out.glob("logs_*.tar.gz")
        with tarfile.open(path) as logs:
            member = logs.extractfile(f"./{name}.log")
            assert member is not None
            return member.read().decode()


def run(root: Path, folder: Path, *arguments: str, **more: str) -> Outcome:
    out = folder / "out"
    done = subprocess.run(
        [root / SUITE, out, *arguments], env=environment(folder, **more), capture_output=True, text=True, timeout=280
    )
    return Outcome(done.returncode, done.stdout + done.stderr, out)


# The whole of it ------------------------------------------------------------------------------------------------------


REHEARSAL = {"PYTHON": sys.executable, "DEVICE": "cpu", "BACKEND": "simt", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.skipif("simt" not in backends(), reason="built without simt")
def test_a_rehearsal_from_the_first_stage_to_the_last(tmp_path: Path) -> None:
    """One test, so that it runs once, however many processes the tests are spread over."""
    done = run(ROOT, tmp_path, **REHEARSAL)
    each_stage_succeeds(done)
    results_are_few_files_with_rows(done)
    a_part_takes_less_than_ten_minutes(done)


def each_stage_succeeds(rehearsal: Outcome) -> None:
    assert rehearsal.status == 0, rehearsal.said
    stages = rehearsal.stages
    assert list(stages) == ALL_STAGES
    for part, names in STAGES.items():
        for name in names:
            stage = stages[name]
            assert stage["part"] == part
            assert "skipped" in stage if name == "flashinfer" else stage["exit"] == 0, name
    assert "a GPU that is not there" in rehearsal.log("machine") and "simt" in rehearsal.log("install")
    assert "verify_typical" in rehearsal.log("check") and "FAILED" not in rehearsal.log("check")
    for name in ("op_tests", "captures"):
        assert " passed" in rehearsal.log(name) and "failed" not in rehearsal.log(name)
    for name in STAGES["sanitizers"]:
        assert f"--tool {name} --kernel-name kns=pagedtree" in rehearsal.log(name)
        assert "-m pagedtree check" in rehearsal.log(name) and "--quick" in rehearsal.log(name)


def results_are_few_files_with_rows(rehearsal: Outcome) -> None:
    assert rehearsal.files == [
        "attention.json", "check.json", "headline.json", "logs_all.tar.gz", "others.json", "stages_all.json",
    ]  # fmt: skip
    for name, ops in {
        "headline": {"tree_attention", "latent_attention", "sample"},
        "attention": {"tree_attention"},
        "others": {"append_kv"},
    }.items():
        result = json.loads((rehearsal.out / f"{name}.json").read_text())
        assert {row["op"] for row in result["rows"]} == ops
        assert all(row["ms"] > 0 for row in result["rows"])
        assert result["machine"]["read_gb_per_s"] > 0
    headline = json.loads((rehearsal.out / "headline.json").read_text())
    assert {target["target"] for row in headline["rows"] for target in row["targets"]} > {
        "x as fast as SDPA on gathered KV >= 7", "of read bandwidth >= 0.8"
    }  # fmt: skip


def a_part_takes_less_than_ten_minutes(rehearsal: Outcome) -> None:
    limits = {name: int(str(stage.get("limit", 60))) for name, stage in rehearsal.stages.items()}
    first = limits["machine"] + limits["install"]
    for part, names in STAGES.items():
        assert first + sum(limits[name] for name in names if name not in ("machine", "install")) < PART_SECONDS, part


# Stages that go wrong -------------------------------------------------------------------------------------------------

# Writes what it was asked for, and its PYTHONPATH; hangs or fails where the arguments contain $HANG or $FAIL.
PRETENDER = """
case "$*" in
  *cp%d%d*) echo cp311; exit ;;
  *"import xdist"*) exit ;;
esac
echo "PYTHONPATH=$PYTHONPATH $*"
while [ $# -gt 0 ]; do
  [[ -n "${FAIL:-}" && "$1" == *"$FAIL"* ]] && exit 3
  if [[ -n "${HANG:-}" && "$1" == *"$HANG"* ]]; then echo "hanging $$"; exec sleep 10; fi
  [ "$1" = --json ] && echo '{"rows": [1]}' > "$2"
  [ "$1" = --target ] && mkdir -p "$2"
  shift
done
exit 0
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree with what the script looks at, older than a minute."""
    for name in ("csrc/a.cu", "python/pagedtree/a.py", "cmake/a.cmake", "CMakeLists.txt", "setup.py", "pyproject.toml"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        os.utime(path, (time.time() - 60,) * 2)
    (tmp_path / "tree" / "benchmarks").mkdir()
    shutil.copy(ROOT / SUITE, tmp_path / "tree" / SUITE)
    executable(tmp_path / "python", PRETENDER)
    return tmp_path


def pretend(copy: Path, *arguments: str, **more: str) -> Outcome:
    executable(copy / "tools" / "nproc", "echo 16")
    return run(copy / "tree", copy, *arguments, PYTHON=str(copy / "python"), **more)


def test_a_stage_that_hangs_loses_only_itself(copy: Path) -> None:
    done = pretend(copy, HANG="check", STAGE_SECONDS="1")
    assert done.status == 1
    stages = {name: stage.get("exit") for name, stage in done.stages.items()}
    assert stages == {**dict.fromkeys(ALL_STAGES, 0), "check": 124, "flashinfer": None}
    assert "hanging" in done.log("check") and " -n 8 " in done.log("op_tests")
    assert len(done.files) <= MOST_FILES and "headline.json" in done.files


def test_headers_of_flashinfer_are_compiled_before_the_benchmark(copy: Path) -> None:
    done = pretend(copy, "headline", FLASHINFER_INCLUDE="/headers")
    assert done.status == 0 and list(done.stages)[-2:] == ["flashinfer", "headline"]
    assert "benchmarks/flashinfer_kernel.py" in done.log("flashinfer")


@pytest.mark.parametrize("fail, failed", [("bench_ops", {"headline"}), ("pytest", {"op_tests", "captures"})])
def test_a_failure_shows_in_the_status(copy: Path, fail: str, failed: set[str]) -> None:
    done = pretend(copy, "headline" if "headline" in failed else "tests", FAIL=fail)
    assert done.status == 1
    assert {name for name, stage in done.stages.items() if stage.get("exit")} == failed
    assert "exit 3" in done.said


def test_nothing_runs_where_nothing_can_be_installed(copy: Path) -> None:
    done = pretend(copy, FAIL="setup.py")
    assert done.status == 1 and list(done.stages) == ["machine", "install"]


@pytest.fixture
def hanging(copy: Path) -> Iterator[tuple[subprocess.Popen[str], Outcome]]:
    """The suite while its second stage after the installation hangs."""
    suite = subprocess.Popen(
        [copy / "tree" / SUITE, copy / "out"],
        env=environment(copy, PYTHON=str(copy / "python"), HANG="bench_ops.py"),
        text=True,
        stdout=subprocess.PIPE,
    )
    running, deadline = copy / "out" / "running.log", time.monotonic() + 30
    while not (running.exists() and "hanging" in running.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield suite, Outcome(0, "", copy / "out")
    suite.kill()
    suite.wait()


def test_results_so_far_survive_a_kill(hanging: tuple[subprocess.Popen[str], Outcome]) -> None:
    suite, found = hanging
    suite.kill()
    suite.wait()
    assert found.files == ["check.json", "logs_all.tar.gz", "running.log", "stages_all.json"]
    assert list(found.stages) == ["machine", "install", "check", "flashinfer"]
    assert "pagedtree check" in found.log("check") and "hanging" in (found.out / "running.log").read_text()


def test_an_interrupt_ends_the_stage_too(hanging: tuple[subprocess.Popen[str], Outcome], copy: Path) -> None:
    suite, found = hanging
    process = int((found.out / "running.log").read_text().rpartition("hanging ")[2])
    suite.send_signal(signal.SIGTERM)
    assert suite.wait(timeout=5) == 1
    deadline = time.monotonic() + 5
    while Path(f"/proc/{process}/cmdline").exists() and Path(f"/proc/{process}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not list((copy / "tmp").iterdir())


def test_unknown_parts_are_refused(copy: Path) -> None:
    done = pretend(copy, "everything")
    assert done.status == 2 and "expected all or one of headline tests sanitizers attention others" in done.said


# What is installed ----------------------------------------------------------------------------------------------------


def wheel_in(folder: Path, seconds_ago: float, tag: str = "cp311") -> Path:
    wheel = folder / f"pagedtree-1.0-{tag}-{tag}-linux_x86_64.whl"
    folder.mkdir(exist_ok=True)
    wheel.write_text("")
    os.utime(wheel, (time.time() - seconds_ago,) * 2)
    return wheel


@pytest.mark.parametrize(
    "seconds_ago, tag, changed, is_taken",
    [
        (30, "cp311", None, True),
        (90, "cp311", None, False),  # all sources are newer
        (30, "cp312", None, False),  # for another Python
        (30, "cp311", "csrc/a.cu", False),
        (30, "cp311", "python/pagedtree/a.py", False),
        (30, "cp311", "python/pagedtree/lib/built.so", True),
    ],
)
def test_a_newer_checkout_beats_an_older_wheel(
    copy: Path, seconds_ago: float, tag: str, changed: str | None, is_taken: bool
) -> None:
    wheel = wheel_in(copy / "tree" / "dist", seconds_ago, tag)
    if changed:
        (copy / "tree" / changed).parent.mkdir(exist_ok=True)
        (copy / "tree" / changed).write_text("new")
    done = pretend(copy, "headline", PYTHONPATH="/elsewhere")
    assert done.status == 0, done.said
    log, used = done.log("install"), done.log("check")
    if is_taken:
        assert f"dist/{wheel.name}" in log and "--no-index --no-deps" in log
        assert "/site:/elsewhere -m pagedtree check" in used and "/site:/elsewhere -m pagedtree info" in log
    else:
        assert "setup.py -q build_ext --inplace" in log and "pip" not in log
        assert f"PYTHONPATH={copy / 'tree' / 'python'}:/elsewhere " in used


def test_a_named_wheel_beats_all(copy: Path) -> None:
    wheel_in(copy / "tree" / "dist", 30)
    named = wheel_in(copy / "given", 900)
    assert str(named) in pretend(copy, "headline", WHEEL=str(named)).log("install")
