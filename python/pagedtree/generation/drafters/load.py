"""Draft heads in any supported folder format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedtree._arguments import argument_error
from pagedtree.generation.drafters.base import Drafter
from pagedtree.generation.drafters.block import BlockDrafter
from pagedtree.generation.drafters.block_config import ARCHITECTURES as BLOCK_ARCHITECTURES
from pagedtree.generation.drafters.block_model import BlockDraftModel
from pagedtree.generation.drafters.checkpoint_config import ConfigEntries
from pagedtree.generation.drafters.eagle import EagleDrafter, ParallelEagleDrafter
from pagedtree.generation.drafters.eagle_config import ARCHITECTURES as EAGLE_ARCHITECTURES
from pagedtree.generation.drafters.eagle_head import EagleHead
from pagedtree.generation.drafters.medusa import MedusaDrafter, MedusaHeads

# Tree size of Medusa heads, whose drafter has no default.
NUM_NODES = 16
# Suffixes of whole models' architectures.
OF_MODELS = ("ForCausalLM", "ForConditionalGeneration")


def load_drafter(
    folder: str | Path, target: Any, *, of_models: Callable[..., Drafter] | None = None, **sizes: int
) -> Drafter:
    """Returns the drafter for the draft head in a folder.

    config.json determines the format: speculators' (eagle3, peagle, dflash, dflash2), EAGLE-3 of SGLang's SpecForge and
    vLLM, DFlash and DFlash 2, Medusa's, and this package's `save_pretrained`.

    target: the transformers model of `generate`. of_models: loads parts of whole models and speculators' mtp, from
    folder, target and sizes; None: refused. sizes: num_nodes, depth and width of the drafter; Medusa's trees have
    num_nodes only. Raises ValueError for another format, else as `EagleHead.from_pretrained` does.
    """
    folder = Path(folder)
    entries = ConfigEntries.load(folder)
    try:
        return _loader_of(entries, of_models)(folder, target, **sizes)
    except ValueError as error:
        verifier = entries.section("speculators_config").section("verifier").value("name_or_path")
        if isinstance(verifier, str):
            raise ValueError(f"{error} (the folder names {verifier[:80]} as its target)") from error
        raise


def _loader_of(entries: ConfigEntries, of_models: Callable[..., Drafter] | None) -> Callable[..., Drafter]:
    """Returns the function that makes a drafter of a folder's format, of folder, target and sizes."""
    of_speculators = OF_SPECULATORS if of_models is None else {**OF_SPECULATORS, "mtp": of_models}
    if "speculators_model_type" in entries:
        return of_speculators[entries.word("speculators_model_type", tuple(of_speculators), "")]
    names = entries.value("architectures", [])
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if any(name in architectures for architectures in BLOCK_ARCHITECTURES.values() for name in names):
        return _block
    if "medusa_num_heads" in entries or entries.value("model_type") == "medusa":
        return _medusa
    # EAGLE's training code names its heads LlamaForCausalLM, like whole models.
    if any(name in EAGLE_ARCHITECTURES for name in names) and (
        "draft_vocab_size" in entries or "LlamaForCausalLM" not in names
    ):
        return _eagle
    if of_models is not None and any(name.endswith(OF_MODELS) for name in names):
        return of_models
    entries.refuse(
        "architectures",
        "a draft head: EAGLE-3 (LlamaForCausalLMEagle3 and others), DFlash (DFlashDraftModel, DFlash2DraftModel),"
        f" medusa_num_heads of Medusa, or speculators_model_type of {', '.join(of_speculators)}",
    )


def _eagle(folder: Path, target: Any, **sizes: int) -> Drafter:
    if sizes.get("width") == 1 and "num_nodes" in sizes:  # a chain is as deep as it has draft nodes
        sizes = {"depth": sizes["num_nodes"] - 1, **sizes}
    head = EagleHead.from_pretrained(folder, target)
    return EagleDrafter(head, **sizes) if head.mask_hidden is None else ParallelEagleDrafter(head, **sizes)


def _block(folder: Path, target: Any, **sizes: int) -> Drafter:
    return BlockDrafter(BlockDraftModel.from_pretrained(folder, target), **sizes)


def _medusa(folder: Path, target: Any, num_nodes: int = NUM_NODES, **sizes: int) -> Drafter:
    if sizes:
        raise argument_error(", ".join(sizes), "not with Medusa heads, whose trees take shape by their scores")
    return MedusaDrafter(MedusaHeads.from_pretrained(folder, target), num_nodes)


OF_SPECULATORS: dict[str, Callable[..., Drafter]] = {
    "eagle3": _eagle,
    "peagle": _eagle,
    "dflash": _block,
    "dflash2": _block,
}
