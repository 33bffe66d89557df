"""Drafting on the device: trees grown by a draft model (EAGLE-2), n-gram trees (prompt lookup), Medusa heads.

Nothing here synchronises; shapes depend on Python ints only, so that a whole step can be captured in one CUDA graph.
"""

from pagedtree.drafting.draft import Draft
from pagedtree.drafting.growth import DraftState, expand_tree, rerank_tree, start_draft
from pagedtree.drafting.proposers import medusa_propose, ngram_propose, rejected_predictions

__all__ = [
    "Draft",
    "DraftState",
    "expand_tree",
    "medusa_propose",
    "ngram_propose",
    "rejected_predictions",
    "rerank_tree",
    "start_draft",
]
