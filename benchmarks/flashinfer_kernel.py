"""FlashInfer's kernels without its package, compiled from its headers and called through ctypes.

    FLASHINFER_INCLUDE=FOLDER python benchmarks/flashinfer_kernel.py flashinfer_kernel.so     # paged prefill, below
    FLASHINFER_INCLUDE=FOLDER python benchmarks/flashinfer_kernel.py flashinfer_sampling.so   # see sampling_peers.py

FOLDER is `flashinfer/data/include` of flashinfer-python 0.7, by default the installed package's; its neighbour `cccl`
precedes the toolkit's. gpu_run/prepare.sh does all of this.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from carried import carried
from torch import Tensor

SOURCE = Path(__file__).with_name("flashinfer_kernel.cu")
HEAD_DIM, DTYPE = 128, torch.bfloat16  # compiled into the library
INT_WORKSPACE = 8 << 20  # bytes, as in FlashInfer
# FlashInfer's flags.
FLAGS = [
    *("-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "--expt-relaxed-constexpr", "-DFLASHINFER_ENABLE_F16"),
    *("-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2"),
]
CCCL = ("cub", "libcudacxx/include", "thrust")


def include_folder() -> Path | None:
    named = os.environ.get("FLASHINFER_INCLUDE")
    found = None if named else importlib.util.find_spec("flashinfer")
    for place in (found.submodule_search_locations or []) if found else []:
        named = str(Path(place) / "data" / "include")
    folder = Path(named) if named else None
    return folder if folder and (folder / "flashinfer" / "attention" / "prefill.cuh").exists() else None


def includes() -> list[str]:
    folder = include_folder()
    if folder is None:
        raise FileNotFoundError("FLASHINFER_INCLUDE names no folder with flashinfer/attention/prefill.cuh")
    return [f"-I{path}" for path in (*(folder.parent / "cccl" / part for part in CCCL), folder) if path.is_dir()]


def compile_library(target: Path) -> None:
    """The target's name names the source. Raises RuntimeError."""
    source = SOURCE.with_name(f"{target.stem}.cu")
    options = ["-gencode", "arch=compute_90a,code=sm_90a", "--split-compile=0", "--shared", "-Xcompiler=-fPIC"]
    command = ["nvcc", *FLAGS, *options, *includes(), "-o", str(target), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "error" in line] or [f"nvcc: status {run.returncode}"]
        raise RuntimeError(f"{source.name} does not compile: {errors[0]}")


@functools.cache
def library() -> ctypes.CDLL:
    return load(carried("flashinfer_kernel.so"))


def load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    found.flashinfer_last_error.restype = ctypes.c_char_p
    found.flashinfer_plan_bytes.restype = ctypes.c_int64
    return found


class Shape(ctypes.Structure):
    """FlashInferShape of the source."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("batch", "num_queries", "num_heads", "num_kv_heads", "page_size")),
        *((name, ctypes.c_void_p) for name in ("float_workspace", "int_workspace", "host_workspace")),
        *((name, ctypes.c_uint64) for name in ("float_bytes", "int_bytes")),
        ("stream", ctypes.c_void_p),
    )


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)


class Wrapper:
    """Replaces BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, workspace: Tensor, lib: Any) -> None:
        self.lib, self.workspace, self.device = lib, workspace, workspace.device
        is_cuda = self.device.type == "cuda"
        self.ints = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=self.device)
        self.host = torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=is_cuda)
        self.overlaps = is_cuda and torch.cuda.get_device_capability() >= (9, 0)
        self.split = ctypes.create_string_buffer(lib.flashinfer_plan_bytes())

    def plan(
        self,
        query_indptr: Tensor,
        page_indptr: Tensor,
        page_indices: Tensor,
        last_page_len: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        custom_mask: Tensor | None = None,
        causal: bool = False,
    ) -> None:
        """Plans int32 [B + 1] offsets of the device; custom_mask bool, each sequence's [queries, keys]."""
        if (head_dim, q_data_type, kv_data_type) != (HEAD_DIM, DTYPE, DTYPE):
            raise ValueError(f"compiled for head size {HEAD_DIM} and bfloat16")
        if (custom_mask is None) != causal:
            raise ValueError("expected either custom_mask or causal")
        self.where = query_indptr, page_indptr, page_indices, last_page_len
        queries, pages = query_indptr.cpu(), page_indptr.cpu()
        sizes = queries.numel() - 1, int(queries[-1]), num_heads, num_kv_heads, page_size
        places = (buffer.data_ptr() for buffer in (self.workspace, self.ints, self.host))
        self.shape = Shape(*sizes, *places, self.workspace.numel(), self.ints.numel(), self.stream())
        self.scale, self.packed, self.packed_indptr = sm_scale, None, None
        if custom_mask is not None:
            keys = (pages.diff() - 1) * page_size + last_page_len.cpu()
            self.pack(custom_mask, (queries.diff() * keys).int())
        self.call("flashinfer_plan", queries, pages, self.split)

    def pack(self, mask: Tensor, pairs: Tensor) -> None:

        def offsets(sizes: Tensor) -> Tensor:
            return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()

        packed = offsets((pairs + 7) // 8)
        self.packed = torch.empty(int(packed[-1]), dtype=torch.uint8, device=self.device)
        self.packed_indptr = packed.to(self.device)
        self.call("flashinfer_pack_mask", mask, self.packed, offsets(pairs).to(self.device), self.packed_indptr)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        """q, out [T, Hq, 128]; caches [pages, page_size, Hkv, 128], contiguous."""
        out = torch.empty_like(q)
        self.shape.stream = self.stream()
        how = self.packed, self.packed_indptr, ctypes.c_float(self.scale), int(self.overlaps)
        self.call("flashinfer_run", self.split, q, *caches, out, *self.where, *how)
        return out

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0

    def call(self, name: str, *arguments: Any) -> None:
        passed = [address(a) if a is None or isinstance(a, Tensor) else a for a in arguments]
        if getattr(self.lib, name)(ctypes.byref(self.shape), *passed):
            raise RuntimeError(f"{name}: {self.lib.flashinfer_last_error().decode()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    compile_library(parser.parse_args().library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
