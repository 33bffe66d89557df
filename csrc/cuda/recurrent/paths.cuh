// The accepted path of a tree, by a warp.
#pragma once

#include "core/recurrent.h"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

// tokens_to_replay(): each lane checks other nodes, and no load waits for the one of another node or of the path's
// length.
__device__ __forceinline__ int32_t replayed_tokens(const RecurrentBatch& p, int64_t b) {
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  if (p.accept_index == nullptr) return state_index_of(p, b) < 0 ? 0 : static_cast<int32_t>(rows.size());
  const int32_t* const path = p.accept_index + b * p.accept_stride;
  const int32_t accepted = p.num_accepted[b];
  bool is_path = true;
  int32_t first = 0;
  do {
    const int32_t j = first + static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t node = j < p.path_width ? path[j] : -1, above = j > 0 && j < p.path_width ? path[j - 1] : -1;
    const bool is_node = node >= 0 && node < rows.size();
    const bool follows = is_node && linked_parent(p, rows.begin, node) == above;
    is_path = !__any_sync(~0u, j <= accepted && !follows);
    first += 32;
  } while (is_path && first <= accepted);
  is_path = is_path && accepted >= 0 && accepted < p.path_width && state_index_of(p, b) >= 0;
  return is_path ? accepted + 1 : 0;
}

}  // namespace pagedtree::cuda
