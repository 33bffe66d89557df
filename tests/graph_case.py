"""Replaces captured CUDA graphs on any device: records ops and replays them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedtree._ops import Prepared


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
