"""Target and drafter of `python -m pagedtree generate`, as its options name them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pagedtree import _C
from pagedtree.generation import drafters
from pagedtree.integrations.transformers.command_files import errors_of, model_folder
from pagedtree.integrations.transformers.model import ModelDrafter
from pagedtree.integrations.transformers.mtp import load_drafter

__all__ = ["DTYPES", "NUM_NODES", "drafter_of", "is_fast", "load_model"]

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Nodes of a tree: the default of drafters with a model; Medusa heads have no default and get this, too.
NUM_NODES = 16
# The options for tree sizes, and their names in `NgramDrafter`.
SIZES = {"num_nodes": "num_nodes", "depth": "max_depth", "width": "max_branches"}
# Our CPU kernels of these names need instructions for products of bfloat16. With them, torch is fast in it, too.
BF16_ISAS = {"avx512", "amx"}


def load_model(option: str, name: str, args: argparse.Namespace) -> Any:
    """Returns the target in --dtype, else in the checkpoint's dtype, or float32 if the CPU is slow in that."""
    print(f"loading {name}", file=sys.stderr)
    with errors_of(option, name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[args.dtype or "auto"])
    dtype, reason = model.dtype, ""
    if args.dtype is None and args.device == "cpu" and not is_fast(dtype):
        model, reason = model.float(), f", because {_word(dtype)} is slow on this CPU"
    print(f"dtype: {_word(model.dtype)}{reason}", file=sys.stderr)
    return model.to(args.device).eval()


def drafter_of(model: Any, args: argparse.Namespace) -> drafters.Drafter | None:
    """Returns the drafter, with its own default sizes; chains for rule "block"."""
    sizes: dict[str, Any] = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {size}")
    if args.rule == "block":
        sizes = {"width": 1, **sizes}
    if args.medusa and (args.depth or args.width):
        raise ValueError("--depth, --width: not with --medusa, whose trees take shape by their scores")
    if args.draft:
        return ModelDrafter(_load_draft(args, model), law=args.draft_law, **_deep(sizes))
    if args.ngram:
        return drafters.NgramDrafter(**{SIZES[name]: size for name, size in sizes.items()})
    heads: dict[str, Callable[[str], drafters.Drafter]] = {
        "medusa": lambda path: drafters.MedusaDrafter(
            drafters.MedusaHeads.from_pretrained(path, model), args.num_nodes or NUM_NODES
        ),
        "eagle": lambda path: drafters.EagleDrafter(drafters.EagleHead.from_pretrained(path, model), **_deep(sizes)),
        "drafter": lambda path: load_drafter(path, model, **sizes),
        "block": lambda path: drafters.BlockDrafter(drafters.BlockDraftModel.from_pretrained(path, model), **sizes),
    }
    for name, load in heads.items():
        path = getattr(args, name)
        if path is not None:
            with errors_of(f"--{name}", path):
                return load(path)
    return None


def _deep(sizes: dict[str, Any]) -> dict[str, Any]:
    is_long = sizes.get("width") == 1 and "num_nodes" in sizes
    return {"depth": sizes["num_nodes"] - 1, **sizes} if is_long else sizes


def _load_draft(args: argparse.Namespace, target: Any) -> Any:
    name = model_folder("--draft", args.draft)
    print(f"loading {name}", file=sys.stderr)
    with errors_of("--draft", name):
        return AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype).to(args.device).eval()


def is_fast(dtype: torch.dtype) -> bool:
    """Returns whether this CPU multiplies the dtype at least as fast as float32."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and not BF16_ISAS.isdisjoint(_C.available_isas()))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
