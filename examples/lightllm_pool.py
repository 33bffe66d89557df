"""lightllm's token pool under pagedtree's ops: pages of one token, K and V side by side in one buffer.

python examples/lightllm_pool.py

A layer's kv_buffer is [slots, K heads + V heads, dim]; req_to_token_indexs [requests, max_len] has the slot of each
position. So the pool is a paged cache of page size 1, and rows of that index are its page table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import DraftTree, TreeBatch, append_kv, compact_kv, prepare_step, tree_attention
from pagedtree.integrations.indices import rows_of


def cache_views(kv_buffer: Tensor, num_k_heads: int) -> tuple[Tensor, Tensor]:
    """Returns K and V [slots, 1, heads, dim] as views of a layer's buffer."""
    k_cache, v_cache = kv_buffer.unsqueeze(1).tensor_split((num_k_heads,), 2)
    return k_cache, v_cache


def page_table(req_to_token_indexs: Tensor, b_req_idx: Tensor, max_len: int) -> Tensor:
    """Returns int32 [B, max_len]: the requests' slots; -1 without a request."""
    return rows_of(req_to_token_indexs[:, :max_len], b_req_idx).int()


def main() -> None:
    """Appends a tree and a chain, attends in one layer, and commits the tree's path."""
    torch.manual_seed(0)
    heads, kv_heads, dim, slots = 8, 2, 64, 200
    kv_buffer = torch.randn(slots, 2 * kv_heads, dim)
    req_to_token_indexs = torch.randperm(slots)[:180].view(3, 60).int()
    b_req_idx, b_seq_len = torch.tensor([2, 0]), torch.tensor([40, 7], dtype=torch.int32)  # tokens in the pool
    trees = TreeBatch.from_trees([DraftTree.full([2, 2]), DraftTree.chain(3)])
    total = trees.parents.shape[0]

    k_cache, v_cache = cache_views(kv_buffer, kv_heads)
    table = page_table(req_to_token_indexs, b_req_idx, 60)
    positions, seq_lens, cu_seqlens_q, new_slots = prepare_step(trees, table, b_seq_len, 1, total_q=total)
    append_kv(torch.randn(total, kv_heads, dim), torch.randn(total, kv_heads, dim), k_cache, v_cache, new_slots)
    out = tree_attention(torch.randn(total, heads, dim), k_cache, v_cache, table, seq_lens, cu_seqlens_q, trees.mask)
    accept_index = torch.tensor([[0, 2, 5, -1], [0, 1, -1, -1]], dtype=torch.int32)
    num_accepted = torch.tensor([2, 1], dtype=torch.int32)
    lens = compact_kv([k_cache, v_cache], table, b_seq_len, accept_index, num_accepted)
    print("positions", positions.tolist(), "out", [*out.shape], "lengths", lens.tolist())


if __name__ == "__main__":
    main()
