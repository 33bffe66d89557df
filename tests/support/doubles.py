"""Replaces CUDA graphs on any device; intercepts simt's launches; CuTe's vectors."""

from __future__ import annotations

import ctypes
import io
import lzma
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pagedtree
from pagedtree._ops import Prepared
from support import ROOT


class Graph:
    """Replaces torch.cuda.CUDAGraph: replays run no Python and keep addresses."""

    replays = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def replay(self) -> None:
        Graph.replays += 1
        for op, args, kwargs, results in self.calls:
            for place, found in zip(results, tree_leaves(op(*args, **kwargs)), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != found.data_ptr():
                    place.copy_(found)


class Recording(TorchDispatchMode):
    """Replaces torch.cuda.graph; like it, raises if the host reads device results."""

    def __init__(self, cuda_graph: Graph, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.graph = cuda_graph

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op is not torch.ops.aten._local_scalar_dense.default
        result = op(*args, **(kwargs or {}))
        self.graph.calls.append((op, args, kwargs or {}, tree_leaves(result)))
        return result


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Prepared, "__del__")  # a replay needs no prepared call
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)


# ---- launches on simt

GRID_AND_BLOCK = [ctypes.POINTER(ctypes.c_uint)] * 2
BYTES = ctypes.c_size_t
EXECUTOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *GRID_AND_BLOCK, BYTES, ctypes.c_void_p, BYTES)


@lru_cache
def symbols_of(library: Path) -> dict[int, str]:
    listing = subprocess.run(["nm", "--defined-only", library], text=True, capture_output=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {int(address, 16): name for address, kind, name in rows if kind in "TtWw"}


def base_of(library: Path) -> int:
    with open("/proc/self/maps") as maps:
        return min(int(line.partition("-")[0], 16) for line in maps if line.rstrip().endswith(str(library)))


def simt_library() -> Path | None:
    """Returns simt's library if it was built."""
    paths = (Path(folder) / "lib" / "libpagedtree_simt.so" for folder in pagedtree.__path__)
    return next((path for path in paths if path.exists()), None)


@contextmanager
def intercepted_launches(simt: Path, execute: Callable[..., int]) -> Iterator[None]:
    """Passes simt's launches to `execute`, which returns 0 to let it run one."""
    library, callback = ctypes.CDLL(str(simt)), EXECUTOR(execute)
    library.pagedtree_simt_set_executor(callback)
    try:
        yield
    finally:
        library.pagedtree_simt_set_executor(EXECUTOR())


@lru_cache
def cute_vectors():
    """Loads the vectors of `make witness`."""
    return np.load(io.BytesIO(lzma.decompress((ROOT / "tests/cute/vectors.npz.xz").read_bytes())))
