"""FlashInfer's kernels without its package, compiled from its headers and called through ctypes.

    FLASHINFER_INCLUDE=FOLDER python benchmarks/flashinfer_kernel.py flashinfer_kernel.so     # paged prefill, below
    FLASHINFER_INCLUDE=FOLDER python benchmarks/flashinfer_kernel.py flashinfer_sampling.so   # see sampling_peers.py

FOLDER is `flashinfer/data/include` of flashinfer-python 0.7; its neighbour `cccl` precedes the toolkit's.
gpu_run/prepare.sh does all of this.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from carried import carried
from torch import Tensor

if TYPE_CHECKING:
    from attention_problem import Problem

SOURCE = Path(__file__).with_name("flashinfer_kernel.cu")
HEAD_DIM, DTYPE = 128, torch.bfloat16  # compiled into the library
WORKSPACE, INT_WORKSPACE = 128 << 20, 8 << 20  # bytes: recommended by its documentation; as in FlashInfer
# FlashInfer's flags.
FLAGS = [
    *("-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "--expt-relaxed-constexpr", "-DFLASHINFER_ENABLE_F16"),
    *("-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2"),
]
CCCL = ("cub", "libcudacxx/include", "thrust")


def includes() -> list[str]:
    folder = Path(os.environ.get("FLASHINFER_INCLUDE", ""))
    if not (folder / "flashinfer" / "attention" / "prefill.cuh").exists():
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
    found = ctypes.CDLL(str(carried("flashinfer_kernel.so")))
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


def pages_of(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Returns FlashInfer's offsets, pages, and rows of the last page."""
    lengths = torch.tensor(p.lengths, dtype=torch.int32)
    pages = -(-lengths // p.page_size)
    indices = torch.cat([row[:count] for row, count in zip(p.page_table, pages.tolist(), strict=True)])
    return offsets_of(pages).to(p.device), indices, (lengths - (pages - 1) * p.page_size).to(p.device)


def offsets_of(sizes: Tensor) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()


class Wrapper:
    """Replaces BatchPrefillWithPagedKVCacheWrapper, causal or with a mask over the whole context."""

    def __init__(self, p: Problem, has_mask: bool) -> None:
        if (p.head_dim, p.dtype, p.cache_dtype) != (HEAD_DIM, DTYPE, DTYPE):
            raise ValueError(f"compiled for head size {HEAD_DIM} and bfloat16")
        self.p, self.has_mask, self.lib = p, has_mask, library()
        sizes = WORKSPACE, INT_WORKSPACE
        self.workspace, self.ints = (torch.empty(size, dtype=torch.uint8, device=p.device) for size in sizes)
        self.host = torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=True)
        self.overlaps = torch.cuda.get_device_capability() >= (9, 0)
        self.split = ctypes.create_string_buffer(self.lib.flashinfer_plan_bytes())
        self.where = p.trees.cu_nodes, *pages_of(p)
        self.packed: Tensor | None = None
        self.packed_indptr: Tensor | None = None

    def plan(self) -> None:
        p, (queries, pages) = self.p, (offsets.cpu() for offsets in self.where[:2])
        sizes = p.batch, int(queries[-1]), p.heads, p.kv_heads, p.page_size
        places = (buffer.data_ptr() for buffer in (self.workspace, self.ints, self.host))
        self.shape = Shape(*sizes, *places, WORKSPACE, INT_WORKSPACE, stream())
        if self.has_mask:
            self.pack()
        self.call("flashinfer_plan", queries, pages, self.split)

    def pack(self) -> None:
        """The mask covers each sequence's queries and keys, so each step packs it again."""
        p, n = self.p, self.p.tree.num_nodes
        tree = torch.from_numpy(p.tree.mask).to(p.device)
        prefixes = (tree.new_ones(n, length - n) for length in p.lengths)
        mask = torch.cat([torch.cat([prefix, tree], 1).flatten() for prefix in prefixes])
        pairs = n * torch.tensor(p.lengths, dtype=torch.int32)
        packed = offsets_of((pairs + 7) // 8)
        self.packed = torch.empty(int(packed[-1]), dtype=torch.uint8, device=p.device)
        self.packed_indptr = packed.to(p.device)
        self.call("flashinfer_pack_mask", mask, self.packed, offsets_of(pairs).to(p.device), self.packed_indptr)

    def run(self, copy: int) -> Tensor:
        p, out = self.p, torch.empty_like(self.p.q)
        self.shape.stream = stream()
        how = self.packed, self.packed_indptr, ctypes.c_float(p.scale), int(self.overlaps)
        self.call("flashinfer_run", self.split, p.q, p.k[copy], p.v[copy], out, *self.where, *how)
        return out

    def call(self, name: str, *arguments: Any) -> None:
        passed = [address(a) if a is None or isinstance(a, Tensor) else a for a in arguments]
        if getattr(self.lib, name)(ctypes.byref(self.shape), *passed):
            raise RuntimeError(f"{name}: {self.lib.flashinfer_last_error().decode()}")


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    compile_library(parser.parse_args().library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
