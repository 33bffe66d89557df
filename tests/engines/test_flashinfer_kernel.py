"""FlashInfer's kernel as the benchmarks call it, compiled from FlashInfer's headers; no GPU is needed for that."""

from __future__ import annotations

import ctypes
import importlib
import shutil
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kernel = importlib.import_module("flashinfer_kernel")
    if kernel.include_folder() is None:
        pytest.skip("neither FLASHINFER_INCLUDE nor an installed flashinfer has its headers")
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")
    return kernel


@pytest.mark.slow
def test_it_compiles(kernel, tmp_path):
    """Without a GPU its calls end in an error that has a text."""
    kernel.compile_library(tmp_path / "flashinfer_kernel.so")
    lib = kernel.load(tmp_path / "flashinfer_kernel.so")
    lib.flashinfer_shape_bytes.restype = ctypes.c_int64
    assert lib.flashinfer_shape_bytes() == ctypes.sizeof(kernel.Shape)
    assert lib.flashinfer_plan_bytes() >= 13 * 8
    assert lib.flashinfer_run and lib.flashinfer_pack_mask
    if not torch.cuda.is_available():
        wrapper = kernel.Wrapper(torch.empty(1 << 20, dtype=torch.uint8), lib)
        indptr, last = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
        form = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": 1.0, "causal": True}
        with pytest.raises(RuntimeError, match=r"flashinfer_plan: .*(CUDA|device|driver)"):
            wrapper.plan(
                indptr, torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1).int(), last, 4, 1, 128, 16, **form
            )
