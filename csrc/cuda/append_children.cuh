// Links of nodes that a warp appends to a tree.
#pragma once

#include "core/tree.h"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

// append_child() for one node per lane, in ascending order, after all preceding nodes. Lanes without `has` have none.
__device__ __forceinline__ void append_children(const TreeOutput& trees, int64_t begin, bool has, int32_t node,
                                                int32_t parent, int16_t* last_child) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t before = (1u << lane) - 1;
  const bool is_child = has && parent >= 0;
  // Lanes without a child pass unique values.
  const uint32_t siblings = __match_any_sync(~0u, is_child ? parent : -1 - lane);
  const uint32_t later = siblings & ~before & ~(1u << lane);
  const int32_t next = __shfl_sync(~0u, node, later != 0 ? __ffs(static_cast<int>(later)) - 1 : lane);
  if (has) {
    last_child[node] = -1;
    trees.first_child[begin + node] = -1;
    trees.next_sibling[begin + node] = later != 0 ? next : -1;
  }
  __syncwarp();
  const bool is_first = is_child && (siblings & before) == 0;
  if (is_first) {
    const int32_t older = last_child[parent];
    (older < 0 ? trees.first_child[begin + parent] : trees.next_sibling[begin + older]) = node;
  }
  __syncwarp();
  if (is_child && later == 0) last_child[parent] = static_cast<int16_t>(node);
  __syncwarp();
}

}  // namespace pagedtree::cuda
