"""SGLang's speculation ops and an attention backend for it, on pagedtree.

The functions have the names, arguments and in-place outputs of sgl_kernel and need no part of SGLang. The backend is
`attention.PagedTreeBackend`; SGLang finds it by its entry point (`pagedtree_plugins`).
"""

from pagedtree.integrations.sglang.kv_cache import move_kv_cache
from pagedtree.integrations.sglang.masks import TreeMaskMode, tree_mask_words
from pagedtree.integrations.sglang.trees import build_tree_kernel_efficient, reconstruct_indices_from_tree_mask
from pagedtree.integrations.sglang.verify import (
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
    verify_tree_greedy_func,
)

__all__ = [
    "TreeMaskMode",
    "build_tree_kernel_efficient",
    "build_tree_kernel_efficient_cpu",
    "move_kv_cache",
    "reconstruct_indices_from_tree_mask",
    "tree_mask_words",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
    "verify_tree_greedy_cpu",
    "verify_tree_greedy_func",
]

build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu = build_tree_kernel_efficient, verify_tree_greedy
