"""`PAGEDTREE_ENGINE=auto` on simt as a Hopper GPU: wgmma's self-test, its stored verdict. Launches: test_limits.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pagedtree import _engine
from pagedtree._engine import PASSED, Facts, chosen_engine, facts, store_verdict, verdict
from pagedtree.check import self_test
from pagedtree.check.case import Place
from pagedtree.testing import backends
from pagedtree.tools import cli

pytestmark = pytest.mark.skipif("simt" not in backends(), reason="built without simt")
ROOT = Path(__file__).resolve().parents[2]
SIMT = Place(torch.device("cpu"), "simt")
FAILED = "failed: no end within 120 s, in tree_attention/wgmma/tile 64/fp16/D 64"


def on_simt() -> Facts:
    return facts("simt", SIMT.device)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of verdicts, not yet made."""
    monkeypatch.setenv("PAGEDTREE_CACHE", str(tmp_path / "made" / "here"))
    monkeypatch.delenv("PAGEDTREE_ENGINE", raising=False)
    return tmp_path / "made" / "here"


# Verdict file ---------------------------------------------------------------------------------------------------------


def test_a_verdict_names_gpu_driver_and_build(cache: Path) -> None:
    found = on_simt()
    assert found.needs == "" and found.path is not None and found.path.parent == cache
    title, gpu, driver, build = found.beginning.splitlines()
    assert (gpu, driver) == ("GPU: simt", "driver: none")
    assert len(build.removeprefix("build: ")) >= 16 and int(build.removeprefix("build: "), 16) > 0
    assert "wgmma" in title and not found.has_passed and verdict(found) is None


def test_a_stored_verdict_is_read() -> None:
    store_verdict(on_simt(), PASSED)
    assert on_simt().has_passed and verdict(on_simt()) == PASSED
    store_verdict(on_simt(), FAILED.replace(" in ", "\nin\n"))
    assert not on_simt().has_passed and verdict(on_simt()) == FAILED
    assert on_simt().path is not None and len(os.listdir(on_simt().path.parent)) == 1


@pytest.mark.parametrize("said", [PASSED, FAILED])
def test_corrupt_and_foreign_verdicts_do_not_count(said: str) -> None:
    store_verdict(on_simt(), said)
    path = on_simt().path
    assert path is not None
    right = path.read_bytes()
    build = on_simt().beginning.splitlines()[3].encode()
    wrong = [
        b"", b"\0" * 300, b"\xff" + right, right[:-1], right[:-2] + b"\n", right + right, right + b"x\n",
        right.replace(b"GPU: simt", b"GPU: NVIDIA H200"), right.replace(b"driver: none", b"driver: 580.159"),
        right.replace(build, build[:-1]), right.replace(b"form 1", b"form 2"), right * 100,
    ]  # fmt: skip
    for content in wrong:
        path.write_bytes(content)
        has_reason = said == FAILED and content.startswith(right[:-2]) and content.count(b"\n") == right.count(b"\n")
        assert not on_simt().has_passed and (verdict(on_simt()) is None or has_reason), content
    path.unlink()
    path.mkdir()
    assert not on_simt().has_passed and verdict(on_simt()) is None
    with pytest.raises(OSError, match="directory"):
        store_verdict(on_simt(), said)
    assert os.listdir(path.parent) == [path.name]


def test_path_of_stored_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = on_simt().path.name  # type: ignore[union-attr]
    monkeypatch.delenv("PAGEDTREE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert on_simt().path == tmp_path / "pagedtree" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert on_simt().path == tmp_path / ".cache" / "pagedtree" / name
    monkeypatch.delenv("HOME")
    assert on_simt().path is None
    with pytest.raises(RuntimeError, match="there is no cache folder: set PAGEDTREE_CACHE"):
        store_verdict(on_simt(), PASSED)


def test_concurrent_stores_leave_a_whole_verdict() -> None:
    """A concurrent reader finds one whole verdict."""
    store_verdict(on_simt(), PASSED)

    def store(said: str) -> None:
        for _ in range(4):
            store_verdict(on_simt(), said)

    writers = [threading.Thread(target=store, args=(said,)) for said in (PASSED, FAILED)]
    for writer in writers:
        writer.start()
    verdicts = set()
    while any(writer.is_alive() for writer in writers):
        verdicts.add(verdict(on_simt()))
    assert verdicts <= {PASSED, FAILED} and len(verdicts) > 0


# Messages -------------------------------------------------------------------------------------------------------------


def test_the_engine_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = {
        "": ("mma.sync", "auto: wgmma is not tested with this GPU, driver and build; `python -m pagedtree check"),
        FAILED: ("mma.sync", f"auto: the self-test of wgmma {FAILED}; `python -m pagedtree check --engine wgmma`"),
        PASSED: ("wgmma", "auto: its self-test has passed with this GPU, driver and build"),
    }
    monkeypatch.setattr(_engine, "backends", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(_engine, "facts", lambda backend, device: facts("simt", SIMT.device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for said, (engine, why) in on_gpu.items():
        if said:
            store_verdict(on_simt(), said)
        found = chosen_engine()
        assert found[0] == engine and found[1].startswith(why)
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "4:163:8")
    assert chosen_engine() == (
        "mma.sync",
        "auto: wgmma needs a GPU of compute capability 9.0 with 227 KB of shared memory for a block, "
        "got 9.0 with 163 KB",
    )
    monkeypatch.setenv("PAGEDTREE_ENGINE", "wgmma")
    assert chosen_engine() == ("wgmma", "PAGEDTREE_ENGINE=wgmma")


@pytest.mark.parametrize(
    ("arguments", "device", "told"),
    [
        (["--device", "cpu"], "4:227:8", "for the device cuda"),
        (["--backend", "simt"], "4:163:8", "needs a GPU of"),
        (["--backend", "simt", "--seconds", "0"], "4:227:8", "--seconds: expected a number above 0, got 0"),
        (["--backend", "simt", "--only", "tile"], "4:227:8", "without --only"),
    ],
)
def test_check_refuses_engines_that_cannot_run(
    arguments: list[str], device: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", device)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["check", "--engine", "wgmma", *arguments])
    assert exit_.value.code == 2 and told in capsys.readouterr().err
    assert on_simt().path is None or not on_simt().path.exists()  # type: ignore[union-attr]


def test_a_verdict_that_cannot_be_kept_is_no_success(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir()
    cache.write_text("no folder")
    monkeypatch.setattr(self_test, "run_child", lambda place, seconds: PASSED)
    assert cli.main(["check", "--backend", "simt", "--engine", "wgmma"]) == 1
    assert "cannot be kept" in capsys.readouterr().out and not on_simt().has_passed


# Self-test process ----------------------------------------------------------------------------------------------------

WRITES = """
import os, signal, sys, time
def write(*lines):
    print(*lines, sep="\\n", file=open(sys.argv[3], "w"), flush=True)
"""
ENDS = {
    "passed": ("write('row 1', 'row 2', 'passed')", PASSED),
    "a row left out": ("write('row 1', 'passed')", "failed: ended with status 0 after 2 of 2 rows"),
    "no word at the end": ("write('row 1', 'row 2')", "failed: ended with status 0"),
    "nothing": ("", "failed: ended with status 0 after 0 of 2 rows"),
    "wrong": ("write('row 1', 'failed: off'); sys.exit(1)", "failed: row 1: failed: off"),
    "passed, but for its status": ("write('row 1', 'row 2', 'passed'); sys.exit(3)", "failed: ended with status 3"),
    "a crash": ("write('row 1'); os.kill(os.getpid(), signal.SIGSEGV)", "failed: ended by signal 11, in row 1"),
    "a hang": ("write('row 1'); time.sleep(1000)", "failed: no end within 0.3 s, in "),
}


@pytest.mark.parametrize("name", ENDS)
def test_each_end_of_the_process_is_told(name: str) -> None:
    code, said = ENDS[name]
    assert self_test.run_child(SIMT, 0.3 if name == "a hang" else 60.0, WRITES + code, 2).startswith(said)


def planted(wrong: str) -> str:
    """Returns a self-test with a wrong wgmma attention; one instruction and one tile run."""
    return f"""
import os, signal, sys, time
from pagedtree.check import self_test
from pagedtree.check.cases import attention
right = attention.tree_attention
def planted(*args, **kwargs):
    out, lse = right(*args, **kwargs)
    if os.environ.get("PAGEDTREE_ENGINE") == "wgmma":
        {wrong}
    return out, lse
attention.tree_attention = planted
names = ["wgmma_ss/bf16/N 64", "wgmma/tile 64/bf16/D 64"]
self_test.run_rows([case for case in self_test.rows() if case.name.endswith(tuple(names))], *sys.argv[1:])
"""


ROW = "tree_attention/wgmma/tile 64/bf16/D 64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("pass", PASSED),
        ("out[-1, -1] *= 1.05", f"failed: {ROW}: failed: out: "),
        ("time.sleep(1000)", f"failed: no end within 20 s, in {ROW}"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", f"failed: ended by signal 11, in {ROW}"),
        ("raise RuntimeError('an illegal access')", f"failed: {ROW}: failed: raised RuntimeError: an illegal access"),
    ],
    ids=["right", "wrong", "hang", "crash", "error"],
)
def test_a_kernel_that_is_wrong_does_not_pass(wrong: str, said: str) -> None:
    assert self_test.run_child(SIMT, 20.0 if "sleep" in wrong else 120.0, planted(wrong), 2).startswith(said)


LAUNCHES = """
import sys
sys.path[:0] = ["tests"]
import torch
from support.doubles import base_of, intercepted_launches, simt_library, symbols_of
from pagedtree.check.case import Place
from pagedtree.check.cases import attention
library, kernels = simt_library(), []
def note(kernel, *rest):
    kernels.append(symbols_of(library)[kernel - base_of(library)])
    return 0
place = Place(torch.device("cpu"), "simt")
with place.active(), intercepted_launches(library, note):
    attention.tile_case((64, 64), 64, "bf16", "", "auto").run(place)
print(sum("attention_sm90_kernel" in name for name in kernels))
"""


def launches_by_wgmma() -> int:
    """Counts wgmma launches of a call in another process."""
    done = subprocess.run([sys.executable, "-c", LAUNCHES], cwd=ROOT, check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.slow
def test_check_command_sets_the_engine_of_ops(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--device", "cpu", "--backend", "simt", "--engine", "wgmma", "--seconds"]
    assert launches_by_wgmma() == 0
    assert cli.main([*command, "1200"]) == 0
    assert "wgmma passed" in capsys.readouterr().out and on_simt().has_passed
    assert launches_by_wgmma() == 1
    assert cli.main([*command, "1"]) == 1
    assert "Attention uses mma.sync here" in capsys.readouterr().out and launches_by_wgmma() == 0
