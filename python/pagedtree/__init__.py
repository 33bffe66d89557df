"""Tree-masked paged attention and tree verification for speculative decoding."""

from pagedtree.tree import DraftTree, TreeBatch, build_trees

__version__ = "0.1.0"

__all__ = [
    "DraftTree",
    "TreeBatch",
    "build_trees",
]
