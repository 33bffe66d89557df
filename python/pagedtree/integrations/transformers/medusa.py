"""Medusa-1 heads and the tree they fill (Cai et al., ICML 2024)."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from pagedtree import DraftTree

__all__ = ["MedusaHeads", "medusa_tree"]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "medusa.safetensors"


class MedusaHeads(nn.Module):
    """Residual blocks that turn a model's last hidden state into that of a later position, read by its own `lm_head`.

    `lm_head` names the token after the hidden state's position; head i (from 0) the token i + 2 after it.
    """

    def __init__(self, hidden_size: int, num_heads: int, lm_head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # Zero blocks are the identity, so that training starts from the model's own next-token guess.
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_heads, hidden_size))
        # In a tuple, so that the model's layer does not become a submodule: its weights are not the heads' to save.
        self._lm_head = (lm_head,)

    @property
    def num_heads(self) -> int:
        return self.weight.shape[0]

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden], normalised as `lm_head` takes them, to logits [..., num_heads, vocab]."""
        update = torch.einsum("...d,hed->...he", hidden, self.weight) + self.bias
        logits: Tensor = self._lm_head[0](hidden.unsqueeze(-2) + F.silu(update))
        return logits

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes config.json and medusa.safetensors into the folder `path`."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        num_heads, hidden_size, _ = self.weight.shape
        config = {"model_type": "medusa", "num_heads": num_heads, "hidden_size": hidden_size}
        (path / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, path / WEIGHTS_NAME, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any) -> MedusaHeads:
        """Heads for `model` (its output layer, device and dtype) from the folder `path`."""
        path = Path(path)
        config = json.loads((path / CONFIG_NAME).read_text())
        lm_head = model.get_output_embeddings()
        heads = cls(config["hidden_size"], config["num_heads"], lm_head)
        heads.load_state_dict(load_file(path / WEIGHTS_NAME))
        return heads.to(lm_head.weight.device, lm_head.weight.dtype).eval()


def medusa_tree(num_heads: int, num_nodes: int) -> DraftTree:
    """The likeliest tree of `num_nodes` nodes, if each of a head's guesses is right half as often as the one before.

    A path of child ranks r1, r2, ... is then right with probability 2^-(r1 + 1) * 2^-(r2 + 1) * ...
    """
    paths: list[list[int]] = []
    queue: list[tuple[int, list[int]]] = [(1, [0])]
    while len(paths) < num_nodes - 1:
        cost, path = heapq.heappop(queue)
        paths.append(path)
        heapq.heappush(queue, (cost + 1, [*path[:-1], path[-1] + 1]))
        if len(path) < num_heads:
            heapq.heappush(queue, (cost + 1, [*path, 0]))
    return DraftTree.from_paths(paths)
