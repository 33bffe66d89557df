"""Tree-masked paged attention and tree verification for speculative decoding."""

from pagedtree.drafting import (
    Draft,
    DraftState,
    expand_tree,
    medusa_propose,
    ngram_propose,
    rejected_predictions,
    rerank_tree,
    start_draft,
)
from pagedtree.sampling import SamplingParams, sample
from pagedtree.tree import DraftTree, TreeBatch, build_trees
from pagedtree.verdict import Verdict
from pagedtree.verify import verify_greedy, verify_sampled

__version__ = "0.1.0"

__all__ = [
    "Draft",
    "DraftState",
    "DraftTree",
    "SamplingParams",
    "TreeBatch",
    "Verdict",
    "build_trees",
    "expand_tree",
    "medusa_propose",
    "ngram_propose",
    "rejected_predictions",
    "rerank_tree",
    "sample",
    "start_draft",
    "verify_greedy",
    "verify_sampled",
]
