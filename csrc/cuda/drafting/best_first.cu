// Best-first search: the next node is the best child of all nodes so far, hence one warp per sequence. Unordered levels
// need two passes over K candidates per node.
#include "core/best_first.h"
#include "cuda/append_children.cuh"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int32_t kCopies = 2048;  // candidates that fit in shared memory

struct BestFirstShared {
  BestFirstTree tree;
  float candidates[kCopies];  // [levels, num_candidates]
};

// Returns a candidate child of a node at this depth, or -inf.
template <bool kCopied>
__device__ __forceinline__ float candidate(const BestFirstTreeParams& p, int64_t b, int32_t depth, int32_t rank) {
  if (depth >= reachable_levels(p) || rank >= p.num_candidates) return -kInfinity;
  if (!kCopied) return level_after(p, b, depth)[rank];
  return ptx::shared<BestFirstShared>().candidates[depth * p.num_candidates + rank];
}

// Returns the child after `last` of a node at this depth, by all lanes.
__device__ __forceinline__ RankedChild search_level(const BestFirstTreeParams& p, int64_t b, int32_t depth, float joint,
                                                    RankedChild last) {
  const RankedChild child =
      child_after(level_after(p, b, depth), p.num_candidates, joint, last, static_cast<int32_t>(threadIdx.x), kLanes);
  const uint32_t bits = ScalarMath::bits<uint32_t>(child.joint), best = __reduce_min_sync(~0u, bits);
  const uint32_t rank = bits == best ? static_cast<uint32_t>(child.rank) : ~0u;
  return {ScalarMath::bits<float>(best), static_cast<int32_t>(__reduce_min_sync(~0u, rank))};
}

__device__ __forceinline__ bool is_unordered(const BestFirstTreeParams& p, const BestFirstTree& tree, int32_t depth) {
  return depth < reachable_levels(p) && tree.out_of_order[depth] != 0;
}

struct OpenNode {
  int32_t node = -1, depth = 0;
  float joint = 0.0f;
  RankedChild next = kNoChild;

  OpenNode() = default;
  __device__ __forceinline__ OpenNode(const BestFirstTree& tree, int32_t of)
      : node(of), depth(tree.depths[of]), joint(tree.joints[of]), next(tree.next[of]) {}
  __device__ __forceinline__ OpenNode of_lane(int lane) const {
    OpenNode other;
    other.node = __shfl_sync(~0u, node, lane);
    other.depth = __shfl_sync(~0u, depth, lane);
    other.joint = __shfl_sync(~0u, joint, lane);
    other.next = {__shfl_sync(~0u, next.joint, lane), __shfl_sync(~0u, next.rank, lane)};
    return other;
  }
};

// Joint log-probabilities of the nodes' next children, or -inf; a lane has every 32nd node.
template <int kSlots>
struct NextChildren {
  float joints[kSlots];

  static __device__ int32_t node_of(int slot) { return slot * kLanes + static_cast<int32_t>(threadIdx.x); }

  __device__ __forceinline__ void set(int32_t node, float joint) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) joints[slot] = node_of(slot) == node ? joint : joints[slot];
  }

  // Returns the node with the best next child, or none. Sums are negative or +0: the best has the smallest bits. Each
  // lane loads its own best node before the winner is known.
  __device__ __forceinline__ OpenNode first(const BestFirstTree& tree) const {
    float joint = joints[0];
    int32_t node = node_of(0);
    bool ties = false;
#pragma unroll
    for (int slot = 1; slot < kSlots; ++slot) {
      ties = joints[slot] > joint ? false : ties || joints[slot] == joint;
      node = joints[slot] > joint ? node_of(slot) : node;
      joint = max_of(joint, joints[slot]);
    }
    const OpenNode own(tree, node);
    const uint32_t bits = ScalarMath::bits<uint32_t>(joint), best = __reduce_min_sync(~0u, bits);
    const uint32_t lanes = __ballot_sync(~0u, bits == best), tied = __ballot_sync(~0u, bits == best && ties);
    if ((lanes & (lanes - 1)) != 0 || tied != 0) {  // ties are rare: compare paths
      if (best == ScalarMath::bits<uint32_t>(-kInfinity)) return {};
      return {tree, first_in_order(tree, ScalarMath::bits<float>(best))};
    }
    return own.of_lane(__ffs(static_cast<int>(lanes)) - 1);
  }

  // Returns the first, in path order, of the nodes whose next child has this log-probability.
  __device__ __forceinline__ int32_t first_in_order(const BestFirstTree& tree, float joint) const {
    int32_t first = -1;
#pragma unroll 1
    for (int slot = 0; slot < kSlots; ++slot) {
      const int32_t node = node_of(slot);
      if (tree.next[node].joint == joint && (first < 0 || tree.comes_before(node, first))) first = node;
    }
#pragma unroll 1
    for (int apart = kLanes / 2; apart > 0; apart /= 2) {
      const int32_t other = __shfl_xor_sync(~0u, first, apart);
      if (other >= 0 && (first < 0 || tree.comes_before(other, first))) first = other;
    }
    return first;
  }
};

// Records the levels out of descending order and copies candidates. Returns true if there are any.
template <bool kCopied>
__device__ __forceinline__ bool check_levels(const BestFirstTreeParams& p, int64_t b, BestFirstTree& tree) {
  constexpr int kLoads = 4;  // pairs in flight
  const uint32_t lane = threadIdx.x, levels = static_cast<uint32_t>(reachable_levels(p));
  const uint32_t width = static_cast<uint32_t>(p.num_candidates);
  for (uint32_t level = lane; level < levels; level += kLanes) tree.out_of_order[level] = 0;
  __syncwarp();
  if (width == 0) return false;
  const uint32_t step_levels = kLanes / width, step_ranks = kLanes - step_levels * width;
  uint32_t level = lane / width, rank = lane - level * width;
  bool any = false;
#pragma unroll 1
  while (__any_sync(~0u, level < levels)) {
    uint32_t of[kLoads], ranks[kLoads];
    float log_probs[kLoads], next[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      of[j] = level;
      ranks[j] = rank;
      const float* const from = level_after(p, b, static_cast<int32_t>(min_of(level, levels - 1))) + rank;
      log_probs[j] = from[0];
      next[j] = rank + 1 < width ? from[1] : -kInfinity;
      const bool wraps = rank + step_ranks >= width;
      level += step_levels + wraps;
      rank += step_ranks - (wraps ? width : 0);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (of[j] >= levels) continue;
      if (kCopied) ptx::shared<BestFirstShared>().candidates[of[j] * width + ranks[j]] = log_probs[j];
      if (in_order(log_probs[j], next[j])) continue;
      any = true;
      atomicExch(&tree.out_of_order[of[j]], 1);
    }
  }
  __syncwarp();
  return __any_sync(~0u, any) != 0;
}

// At most 32 * kSlots nodes. Below 32 slots, candidates are copied to shared memory.
template <int kSlots>
__global__ void __launch_bounds__(kLanes, 1) best_first_kernel(const __grid_constant__ BestFirstTreeParams p) {
  constexpr bool kCopied = kSlots < kLanes;
  auto& tree = ptx::shared<BestFirstShared>().tree;
  const int64_t b = blockIdx.x;
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  if (b == 0 && lane == 0) p.trees.cu_nodes[0] = 0;
  if (b >= p.batch) return;
  const bool searches = check_levels<kCopied>(p, b, tree);
  const RankedChild root{0.0f, -1};
  RankedChild first = child_of(root.joint, candidate<kCopied>(p, b, 0, 0), 0);  // of a new node
  if (searches && is_unordered(p, tree, 0)) first = search_level(p, b, 0, root.joint, kBeforeAll);
  NextChildren<kSlots> open;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    open.joints[slot] = -kInfinity;
    tree.next[open.node_of(slot)] = kNoChild;
  }
  __syncwarp();
  if (lane == 0) {
    tree.append(0, -1, 0, root);
    tree.next[0] = first;
  }
  open.set(0, first.joint);
  __syncwarp();
  int32_t size = 1;
  while (size < p.num_nodes) {
    const OpenNode chosen = open.first(tree);
    const int32_t parent = chosen.node, depth = chosen.depth;
    if (parent < 0) break;
    const int32_t node = size++;
    const RankedChild child = chosen.next;
    const float next_candidate = candidate<kCopied>(p, b, depth, child.rank + 1),
                first_candidate = candidate<kCopied>(p, b, depth + 1, 0);
    RankedChild next = child_of(chosen.joint, next_candidate, child.rank + 1);
    first = child_of(child.joint, first_candidate, 0);
#pragma unroll 1
    for (int of_child = 0; searches && of_child < 2; ++of_child) {
      if (!is_unordered(p, tree, depth + of_child)) continue;
      RankedChild last = kBeforeAll;
      if (of_child == 0) last = child;
      const RankedChild found = search_level(p, b, depth + of_child, of_child == 0 ? chosen.joint : child.joint, last);
      if (of_child == 0) next = found;
      if (of_child == 1) first = found;
    }
    open.set(parent, next.joint);
    open.set(node, first.joint);
    __syncwarp();
    if (lane == 0) {
      tree.append(node, parent, depth + 1, child);
      tree.next[parent] = next;
      tree.next[node] = first;
    }
    __syncwarp();
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
  const bool is_copied = int64_t{reachable_levels(p)} * p.num_candidates <= kCopies;
  const auto kernel = is_copied && p.num_nodes <= 64    ? best_first_kernel<2>
                      : is_copied && p.num_nodes <= 256 ? best_first_kernel<8>
                                                        : best_first_kernel<kMaxTreeNodes / kLanes>;
  launch(kernel, dim3(static_cast<unsigned>(max_of<int64_t>(p.batch, 1))), dim3(kLanes), sizeof(BestFirstShared),
         ctx.stream, p);
}

}  // namespace pagedtree::cuda
