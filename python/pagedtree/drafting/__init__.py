"""Drafting on the device: trees grown by a draft model (EAGLE-2), n-gram trees (prompt lookup), Medusa heads, the best
tree over levels of candidates, and the best nodes of a batch.

Nothing here synchronises; shapes depend on Python ints only.
"""

from pagedtree.drafting.best_trees import best_first_tree, select_nodes
from pagedtree.drafting.draft import Draft
from pagedtree.drafting.growth import DraftState as DraftState
from pagedtree.drafting.growth import expand_tree, rerank_tree, start_draft
from pagedtree.drafting.proposers import medusa_propose, ngram_propose
from pagedtree.drafting.proposers import rejected_predictions as rejected_predictions

__all__ = [
    "Draft",
    "best_first_tree",
    "expand_tree",
    "medusa_propose",
    "ngram_propose",
    "rerank_tree",
    "select_nodes",
    "start_draft",
]
