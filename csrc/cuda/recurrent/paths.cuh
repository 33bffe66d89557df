// The accepted path of a tree, by a warp.
#pragma once

#include "core/recurrent.h"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

// tokens_to_replay(): each lane checks other nodes, so that no load waits for the node above.
__device__ __forceinline__ int32_t replayed_tokens(const RecurrentBatch& p, int64_t b) {
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  if (p.accept_index == nullptr) return state_index_of(p, b) < 0 ? 0 : static_cast<int32_t>(rows.size());
  const int32_t* const path = p.accept_index + b * p.accept_stride;
  const int32_t accepted = p.num_accepted[b];
  bool is_path = state_index_of(p, b) >= 0 && accepted >= 0 && accepted < p.path_width;
  for (int32_t first = 0; is_path && first <= accepted; first += 32) {
    const int32_t j = min_of(first + static_cast<int32_t>(threadIdx.x) % 32, accepted);
    const int32_t node = path[j], above = j == 0 ? -1 : path[j - 1];
    const bool is_node = node >= 0 && node < rows.size();
    is_path = !__any_sync(~0u, !is_node || linked_parent(p, rows.begin, node) != above);
  }
  return is_path ? accepted + 1 : 0;
}

}  // namespace pagedtree::cuda
