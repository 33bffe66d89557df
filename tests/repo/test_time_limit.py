"""A test that hangs fails by its name, and the tests after it run (tests/time_limit.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import ctypes, time
import pytest

def test_first(): pass

def test_hangs():  # in native code that keeps Python's lock
    ctypes.PyDLL(None).sleep(60)

@pytest.mark.slow
def test_long():
    time.sleep(1.0)

def test_last(): pass
"""


def run(folder: Path, *options: str) -> str:
    (folder / "test_hanging.py").write_text(TESTS)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "time_limit", "-p", "xdist", "-p", "no:cacheprovider", "-W", "ignore",
         *options],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder, text=True, capture_output=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stdout + done.stderr


def test_the_worker_of_a_hanging_test_is_replaced(tmp_path: Path) -> None:
    said = run(tmp_path, "-n", "1", "--time-limit", "0.7")
    assert re.search(r"^FAILED test_hanging.py::test_hangs", said, re.MULTILINE), said
    assert "1 failed, 3 passed" in said


def test_without_workers_the_stack_names_the_test(tmp_path: Path) -> None:
    said = run(tmp_path, "-n", "0", "--time-limit", "0.7")
    assert "Timeout (0:00:00.700000)!" in said and re.search(
        r'test_hanging.py", line \d+ in test_hangs$', said, re.MULTILINE
    )
