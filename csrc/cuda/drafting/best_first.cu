#include "core/best_first.h"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kLanes = 32;

// The first of the lanes' children, for all lanes.
__device__ __forceinline__ RankedChild first_of_lanes(RankedChild child) {
  const uint32_t key = order_key<ScalarMath>(child.joint), best = __reduce_max_sync(~0u, key);
  const uint32_t rank = key == best ? static_cast<uint32_t>(child.rank) : ~0u;
  return {logit_of_key<ScalarMath>(best), static_cast<int32_t>(__reduce_min_sync(~0u, rank))};
}

// The node whose next child comes first, of the first `size` nodes; -1 if none has a next child.
__device__ __forceinline__ int32_t first_of_nodes(const BestFirstTree& tree, int32_t size) {
  int32_t first = -1;
  for (int32_t node = threadIdx.x; node < size; node += kLanes) {
    if (is_present(tree.next[node].joint) && (first < 0 || tree.comes_before(node, first))) first = node;
  }
  const uint32_t key = first >= 0 ? order_key<ScalarMath>(tree.next[first].joint) : 0,
                 best = __reduce_max_sync(~0u, key);
  if (best == 0) return -1;
  const uint32_t lanes = __ballot_sync(~0u, key == best);
  if (popcount32(lanes) > 1) {  // seldom: paths have to be compared
    for (int bits = kLanes / 2; bits > 0; bits /= 2) {
      const int32_t other = __shfl_xor_sync(~0u, first, bits);
      if (other >= 0 && (first < 0 || tree.comes_before(other, first))) first = other;
    }
  }
  return __shfl_sync(~0u, first, __ffs(static_cast<int>(lanes)) - 1);
}

// Notes which levels are not in descending order.
__device__ __forceinline__ void check_levels(const BestFirstTreeParams& p, int64_t b, BestFirstTree& tree) {
  const uint32_t lane = threadIdx.x, levels = static_cast<uint32_t>(reachable_levels(p));
  for (uint32_t level = lane; level < levels; level += kLanes) tree.out_of_order[level] = 0;
  __syncwarp();
  if (p.num_candidates > 1) {
    const uint32_t pairs = static_cast<uint32_t>(p.num_candidates - 1);
#pragma unroll 4
    for (uint32_t i = lane; i < levels * pairs; i += kLanes) {
      const uint32_t level = i / pairs;
      const float* log_probs = level_after(p, b, static_cast<int32_t>(level)) + i % pairs;
      if (!in_order(log_probs[0], log_probs[1])) atomicExch(&tree.out_of_order[level], 1);
    }
  }
  __syncwarp();
}

// One warp per sequence: a node follows from the one before, so the nodes are found one after the other, each by all
// lanes. Sequences share nothing. A node needs a pass over the nodes, and two passes over K candidates, its parent's
// and its own, where these are not in descending order.
__global__ void __launch_bounds__(kLanes, 1) best_first_kernel(const __grid_constant__ BestFirstTreeParams p) {
  auto& tree = ptx::shared<BestFirstTree>();
  const int64_t b = blockIdx.x;
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  if (b == 0 && lane == 0) p.trees.cu_nodes[0] = 0;
  if (b >= p.batch) return;
  const auto child_of = [&](float joint, int32_t depth, RankedChild last) {
    if (depth >= reachable_levels(p)) return kNoChild;
    const float* log_probs = level_after(p, b, depth);
    if (tree.out_of_order[depth] == 0) return child_in_order(log_probs, p.num_candidates, joint, last);
    return first_of_lanes(child_after(log_probs, p.num_candidates, joint, last, lane, kLanes));
  };
  check_levels(p, b, tree);
  RankedChild child = child_of(0.0f, 0, kBeforeAll);
  if (lane == 0) {
    tree.append(0, -1, {0.0f, -1});
    tree.next[0] = child;
  }
  __syncwarp();
  int32_t size = 1;
  while (size < p.num_nodes) {
    const int32_t parent = first_of_nodes(tree, size);
    if (parent < 0) break;
    const int32_t node = size++, depth = tree.depths[parent];
    child = tree.next[parent];
    const RankedChild sibling = child_of(tree.joints[parent], depth, child);
    const RankedChild below = child_of(child.joint, depth + 1, kBeforeAll);
    __syncwarp();
    if (lane == 0) {
      tree.append(node, parent, child);
      tree.next[parent] = sibling;
      tree.next[node] = below;
    }
    __syncwarp();
  }
  for (int32_t node = lane; node < p.num_nodes; node += kLanes) write_best_first(p, b, tree, size, node);
  if (lane == 0) {
    p.trees.cu_nodes[b + 1] = static_cast<int32_t>((b + 1) * p.num_nodes);
    p.trees.valid[b] = true;
  }
}

}  // namespace

void CudaBackend::best_first_tree(const BestFirstTreeParams& p, const ExecContext& ctx) const {
  launch(best_first_kernel, dim3(static_cast<unsigned>(max_of<int64_t>(p.batch, 1))), dim3(kLanes),
         sizeof(BestFirstTree), ctx.stream, p);
}

}  // namespace pagedtree::cuda
