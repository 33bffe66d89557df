"""SGLang's n-gram worker imports its op from here."""

from pagedtree.integrations.sglang import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
