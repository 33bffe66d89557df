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


def test_the_worker_of_a_hanging_test_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(TESTS)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-p", "time_limit", "-p", "xdist", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "1", "--time-limit", "0.7"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=50)
    said = done.stdout + done.stderr
    assert re.search(r"^FAILED test_hanging.py::test_hangs", said, re.MULTILINE), said
    assert done.returncode == 1 and "1 failed, 3 passed" in said
