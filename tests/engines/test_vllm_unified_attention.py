"""What the benchmarks pass to vLLM's Triton kernel, against its source, which is read and never imported."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from package_sources import Sources

SOURCES = Sources("vllm")
PATH = "v1/attention/ops/triton_unified_attention.py"


@pytest.mark.parametrize("tree", ["binary 16", "chain 1"])
def test_it_takes_these_arguments(monkeypatch, tree) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    given: dict = {}
    stand_in = SimpleNamespace(unified_attention=lambda **arguments: given.update(arguments))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention", stand_in)
    attention = importlib.import_module("attention_peers").ATTENTION
    shape = attention.base | {"batch": 1, "length": 64, "tree": tree}
    peer = importlib.import_module("gpu_attention_peers").triton_unified
    peer.make(attention.problem(shape, torch.device("cpu"))).run(0)
    theirs = SOURCES.definition(PATH, "unified_attention").args
    names = [argument.arg for argument in theirs.args]
    assert set(names[: len(names) - len(theirs.defaults)]) <= set(given) <= set(names)


def test_it_computes_the_same() -> None:
    script = Path(__file__).with_name("interpret_unified_attention.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("equal:") == 4
