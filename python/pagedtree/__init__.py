"""Tree-masked paged attention and tree verification for speculative decoding."""

from pagedtree.tree import DraftTree, TreeBatch, build_trees
from pagedtree.verdict import Verdict

__version__ = "0.1.0"

__all__ = [
    "DraftTree",
    "TreeBatch",
    "Verdict",
    "build_trees",
]
