"""Tree-masked paged attention and tree verification for speculative decoding."""

from pagedtree.sampling import SamplingParams, sample
from pagedtree.tree import DraftTree, TreeBatch, build_trees
from pagedtree.verdict import Verdict
from pagedtree.verify import verify_greedy, verify_sampled

__version__ = "0.1.0"

__all__ = [
    "DraftTree",
    "SamplingParams",
    "TreeBatch",
    "Verdict",
    "build_trees",
    "sample",
    "verify_greedy",
    "verify_sampled",
]
