"""Without draft trees an engine is vLLM's own; trees without the variable are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from vllm_case import TARGET, tree_options

PROGRAM = Path(__file__).parent / "untouched.py"
GROUPS = "vllm.general_plugins", "vllm.platform_plugins"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **variables}
    del env["PAGEDTREE_PLUGINS"]
    return subprocess.run([sys.executable, PROGRAM, "vllm", *arguments], capture_output=True, text=True, env=env)


def test_installed_plugins_change_nothing():
    others = {entry.name for group in GROUPS for entry in entry_points(group=group)} - {"pagedtree"}
    installed, missing = run(), run(VLLM_PLUGINS=",".join(["none", *others]))
    assert installed.returncode == missing.returncode == 0, installed.stderr + missing.stderr
    assert installed.stdout.splitlines()[-1] == "[]"
    assert installed.stdout == missing.stdout


def test_drafter_without_the_variable_is_refused():
    options = {"model": TARGET, "dtype": "float32", "enforce_eager": True, "max_model_len": 512, **tree_options()}
    done = run(json.dumps(options))
    assert done.returncode != 0
    assert "expected PAGEDTREE_PLUGINS=vllm in the environment, got None" in done.stderr
