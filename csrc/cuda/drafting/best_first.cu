#include "core/best_first.h"
#include "cuda/backend.h"
#include "cuda/append_children.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kLanes = 32;

// Children of `node` that come after `last`; they are candidates of `level`. A node below 0: none are looked for.
struct Cursor {
  int32_t node, level;
  float joint;  // of the node
  RankedChild last;
};

// The first child after the cursor that lane `source` has, by all lanes.
__device__ __forceinline__ RankedChild search_level(const BestFirstTreeParams& p, int64_t b, const Cursor& cursor,
                                                    int source) {
  const int32_t level = __shfl_sync(~0u, cursor.level, source);
  const float joint = __shfl_sync(~0u, cursor.joint, source);
  const RankedChild last{__shfl_sync(~0u, cursor.last.joint, source), __shfl_sync(~0u, cursor.last.rank, source)};
  const RankedChild child =
      child_after(level_after(p, b, level), p.num_candidates, joint, last, static_cast<int32_t>(threadIdx.x), kLanes);
  const uint32_t bits = ScalarMath::bits<uint32_t>(child.joint), best = __reduce_min_sync(~0u, bits);
  const uint32_t rank = bits == best ? static_cast<uint32_t>(child.rank) : ~0u;
  return {ScalarMath::bits<float>(best), static_cast<int32_t>(__reduce_min_sync(~0u, rank))};
}

// Finds what comes next at each lane's cursor. `searches`: some level is out of order.
__device__ __forceinline__ void find_next(const BestFirstTreeParams& p, int64_t b, const Cursor& cursor, bool searches,
                                          BestFirstTree& tree) {
  const bool has_level = cursor.node >= 0 && cursor.level < reachable_levels(p);
  RankedChild next = kNoChild;
  if (has_level) next = child_in_order(level_after(p, b, cursor.level), p.num_candidates, cursor.joint, cursor.last);
  if (searches) {
    const bool is_searched = has_level && tree.out_of_order[cursor.level] != 0;
    for (uint32_t lanes = __ballot_sync(~0u, is_searched); lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(static_cast<int>(lanes)) - 1;
      const RankedChild found = search_level(p, b, cursor, source);
      if (static_cast<int>(threadIdx.x) == source) next = found;
    }
  }
  __syncwarp();
  if (cursor.node >= 0) tree.next[cursor.node] = next;
  __syncwarp();
}

// The node whose next child comes first, of the first `size` nodes; -1 if none has a next child. Sums are never above
// 0, and never -0, so that the best one has the least bits.
__device__ __forceinline__ int32_t first_of_nodes(const BestFirstTree& tree, int32_t size) {
  int32_t first = -1;
  float joint = -kInfinity;
  for (int32_t node = threadIdx.x; node < size; node += kLanes) {
    const float of_node = tree.next[node].joint;
    if (of_node > joint || (of_node == joint && first >= 0 && tree.comes_before(node, first))) {
      joint = of_node;
      first = node;
    }
  }
  const uint32_t bits = ScalarMath::bits<uint32_t>(joint), best = __reduce_min_sync(~0u, bits);
  const uint32_t lanes = __ballot_sync(~0u, first >= 0 && bits == best);
  if ((lanes & (lanes - 1)) != 0) {  // seldom: paths have to be compared
    for (int apart = kLanes / 2; apart > 0; apart /= 2) {
      const int32_t other = __shfl_xor_sync(~0u, first, apart);
      if (other >= 0 && (first < 0 || tree.comes_before(other, first))) first = other;
    }
  }
  return lanes != 0 ? __shfl_sync(~0u, first, __ffs(static_cast<int>(lanes)) - 1) : -1;
}

// Notes which levels are not in descending order; returns whether any is not.
__device__ __forceinline__ bool check_levels(const BestFirstTreeParams& p, int64_t b, BestFirstTree& tree) {
  const uint32_t lane = threadIdx.x, levels = static_cast<uint32_t>(reachable_levels(p));
  for (uint32_t level = lane; level < levels; level += kLanes) tree.out_of_order[level] = 0;
  __syncwarp();
  bool any = false;
  if (p.num_candidates > 1) {
    const uint32_t pairs = static_cast<uint32_t>(p.num_candidates - 1);
#pragma unroll 4
    for (uint32_t i = lane; i < levels * pairs; i += kLanes) {
      const uint32_t level = i / pairs;
      const float* log_probs = level_after(p, b, static_cast<int32_t>(level)) + i % pairs;
      if (in_order(log_probs[0], log_probs[1])) continue;
      atomicExch(&tree.out_of_order[level], 1);
      any = true;
    }
  }
  __syncwarp();
  return __any_sync(~0u, any) != 0;
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
  const bool searches = check_levels(p, b, tree);
  const RankedChild root{0.0f, -1};
  if (lane == 0) tree.append(0, -1, 0, root);
  find_next(p, b, {lane == 0 ? 0 : -1, 0, root.joint, kBeforeAll}, searches, tree);
  int32_t size = 1;
  while (size < p.num_nodes) {
    const int32_t parent = first_of_nodes(tree, size);
    if (parent < 0) break;
    const int32_t node = size++, depth = tree.depths[parent];
    const RankedChild child = tree.next[parent];
    Cursor cursor{-1, 0, 0.0f, kBeforeAll};
    if (lane == 0) cursor = {node, depth + 1, child.joint, kBeforeAll};
    if (lane == 1) cursor = {parent, depth, tree.joints[parent], child};
    if (lane == 0) tree.append(node, parent, depth + 1, child);
    find_next(p, b, cursor, searches, tree);
  }
  const int64_t begin = b * p.num_nodes;
  for (int32_t node = lane; node < p.num_nodes; node += kLanes) write_best_first(p, b, tree, size, node);
  for (int32_t first = 0; first < size; first += kLanes) {
    const int32_t node = first + lane;
    append_children(p.trees, begin, node < size, node, node < size ? tree.parents[node] : -1, tree.last_child);
  }
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
