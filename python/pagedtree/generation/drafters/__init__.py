"""Drafters of the next tokens."""

from pagedtree.generation.drafters.base import Drafter, FeatureRows, NoDrafter, StepResult
from pagedtree.generation.drafters.block import BlockDrafter
from pagedtree.generation.drafters.block_model import BlockDraftConfig, BlockDraftModel
from pagedtree.generation.drafters.combined import CombinedDrafter
from pagedtree.generation.drafters.eagle import EagleDrafter, ParallelEagleDrafter
from pagedtree.generation.drafters.eagle_head import EagleHead
from pagedtree.generation.drafters.load import load_drafter
from pagedtree.generation.drafters.medusa import MedusaDrafter, MedusaHeads, medusa_tree
from pagedtree.generation.drafters.model import ModelDrafter
from pagedtree.generation.drafters.ngram import NgramDrafter
from pagedtree.generation.drafters.suffix import SuffixDrafter
from pagedtree.generation.drafters.text_memory import TextMemory

__all__ = [
    "BlockDraftConfig",
    "BlockDraftModel",
    "BlockDrafter",
    "CombinedDrafter",
    "Drafter",
    "EagleDrafter",
    "EagleHead",
    "FeatureRows",
    "MedusaDrafter",
    "MedusaHeads",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "ParallelEagleDrafter",
    "StepResult",
    "SuffixDrafter",
    "TextMemory",
    "load_drafter",
    "medusa_tree",
]
