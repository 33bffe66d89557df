"""Compares the benchmarks' peer `triton_unified` with tree_attention, vLLM's kernel in Triton's interpreter on a CPU.

Run by test_vllm_unified_attention.py in a process of its own: Triton must know before it is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
import vllm  # noqa: F401

# Without a GPU vLLM takes Triton to be absent.
utils = ModuleType("vllm.triton_utils")
utils.triton, utils.tl = triton, tl  # type: ignore[attr-defined]
sys.modules["vllm.triton_utils"] = utils

from vllm.v1.attention.ops import triton_unified_attention as kernel  # noqa: E402


@triton.jit
def load_between_queries(rows, positions, context, count):
    """vLLM's kernel says `and` between two tensors, which the interpreter takes for Python's `and`."""
    key = positions - context
    return tl.load(rows + key[None, :], mask=((key >= 0) & (key < count))[None, :], other=0.0)


kernel.load_qq_bias_tile = load_between_queries

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from attention_peers import ATTENTION  # noqa: E402
from gpu_attention_peers import triton_unified  # noqa: E402

BASE = ATTENTION.base | {"batch": 2, "length": 150, "heads": "4/2", "head_dim": 64, "dtype": "float32"}
for change in (
    {"tree": "chain 1"},
    {"tree": "binary 16"},
    {"tree": "EAGLE-2 60", "lengths": "ragged", "batch": 4, "page_size": 32},
    {"tree": "prefill 64"},
):
    problem = ATTENTION.problem(BASE | change, torch.device("cpu"))
    ATTENTION.check(problem, ATTENTION.peers[0].make(problem), triton_unified.make(problem))
    print("equal:", change)
