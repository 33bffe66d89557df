"""Other names of the same ops in SGLang."""

from __future__ import annotations

from torch import Tensor

from pagedtree.integrations.sglang.trees import build_tree_kernel_efficient, either_spelling
from pagedtree.integrations.sglang.verify import verify_tree_greedy

__all__ = ["build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu", "verify_tree_greedy_func"]

build_tree_kernel_efficient_cpu = build_tree_kernel_efficient
verify_tree_greedy_cpu = verify_tree_greedy


@either_spelling
def verify_tree_greedy_func(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify_tree_greedy`, and returns predicts, accept_index and accept_token_num. topk has no effect."""
    outputs = predicts, accept_index, accept_token_num
    links = retrive_index, retrive_next_token, retrive_next_sibling
    verify_tree_greedy(*outputs, candidates, *links, target_predict)
    return outputs
