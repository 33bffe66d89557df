"""A stand-in for captured CUDA graphs, on any device: it records ops with their tensors and runs them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedtree._ops import Prepared


class Graph:
    """Stands in for torch.cuda.CUDAGraph: nothing of Python runs at a replay, and all tensors stay where they were."""

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
    """Stands in for torch.cuda.graph, which raises where the host reads what the device has computed."""

    def __init__(self, graph: Graph, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op is not torch.ops.aten._local_scalar_dense.default
        result = op(*args, **(kwargs or {}))
        self.graph.calls.append((op, args, kwargs or {}, tree_leaves(result)))
        return result


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Prepared, "__del__")  # a graph does not ask whether what it has launched with is still there
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
