// A tree in shared memory, so that a walk does not load its links one after another from L2.
#pragma once

#include "core/tree_walk.h"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

constexpr int32_t kLeftToOthers = -1;  // status of a tree for another kernel

// Copies the tree, by all threads of a CTA, before a barrier.
__device__ __forceinline__ void copy_tree(const TreeWalk& walk, NearTree& near) {
#pragma unroll 1
  for (int32_t node = static_cast<int32_t>(threadIdx.x); node < walk.num_nodes; node += blockDim.x) {
    const int64_t row = walk.rows.begin + node;
    near.first_child[node] = walk.p.first_child[row];
    near.next_sibling[node] = walk.p.next_sibling[row];
    near.tokens[node] = draft_token_at(walk.p, row);
  }
}

// Prepares a walk of all threads of a cluster.
__device__ __forceinline__ void begin_near(TreeWalk& walk, NearTree& near) {
  copy_tree(walk, near);
  walk.near = &near;
  ptx::meet_cluster();
}

}  // namespace pagedtree::cuda
