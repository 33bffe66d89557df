"""An installed plugin leaves SGLang unchanged under another attention backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_engine import environment

pytest.importorskip("xgrammar", reason="SGLang's dependencies are not installed: make test-engines ENGINE=sglang")
pytest.importorskip("sglang")
PROGRAM = Path(__file__).parent / "untouched.py"


def test_installed_plugin_changes_nothing() -> None:
    def run(**variables: str) -> list[str]:
        env = {**environment(), **variables}
        done = subprocess.run([sys.executable, PROGRAM, "sglang"], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert "PAGEDTREE_PLUGINS" not in os.environ
    installed, missing = run(), run(SGLANG_PLUGINS="none")
    assert installed == missing  # both list our modules: the stand-in of sgl_kernel imports some
