"""A pytest plugin that runs JetSpec's tests on a CPU: recorded graphs, no compilation, our ops."""

from __future__ import annotations

import torch
from support import doubles

from pagedtree.integrations import jetspec


class Graph(doubles.Graph):
    def replay(self) -> None:
        with torch.inference_mode():
            super().replay()

    def pool(self) -> None:
        pass


setattr(torch.cuda, "CUDAGraph", Graph)  # noqa: B010
setattr(torch.cuda, "graph", doubles.Recording)  # noqa: B010
torch.cuda.synchronize = lambda *args: None
torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]
setattr(torch, "compile", lambda function=None, **options: function)  # noqa: B010 (a traced function is not recorded)
jetspec.install()
