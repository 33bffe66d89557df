// Depths, masks, and links of trees from parents: one CTA per tree, a warp per 32 nodes, by pointer jumping.
#include "core/tree.h"
#include "cuda/append_children.cuh"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kMaxWords = kMaxTreeNodes / kMaskWordBits;

// The link out of a block of 32 nodes (a mask word) if it leads to no node.
constexpr int16_t kNothing = -1, kBrokenLink = -2;

// Followed in shared memory by BlockMasks per warp.
struct TreeShared {
  int16_t parents[kMaxTreeNodes];  // kNothing at the root, kBrokenLink if invalid
  // A node's path within its block: mask, number of links, and the node above.
  uint32_t within[kMaxTreeNodes];
  int16_t links[kMaxTreeNodes];
  int16_t above[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];  // -1: unreachable
  int16_t last_child[kMaxTreeNodes];
};

// Mask rows of a block, padded against bank conflicts of lanes with a row each.
struct BlockMasks {
  int32_t rows[32][kMaxWords + 1];
};

// Computes the paths within a block by pointer jumping, one lane per node.
__device__ __forceinline__ void climb_block(TreeShared& tree, int32_t node, int32_t parent, int32_t num_nodes) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), block = node - lane;
  int32_t above = parent, links = parent >= 0 ? 1 : 0;
  uint32_t within = 1u << lane;
  while (__any_sync(~0u, above >= block)) {
    const int source = above >= block ? above - block : lane;
    const uint32_t further = __shfl_sync(~0u, within, source);
    const int32_t more = __shfl_sync(~0u, links, source), next = __shfl_sync(~0u, above, source);
    if (above < block) continue;
    within |= further;
    links += more;
    above = next;
  }
  if (node >= num_nodes) return;
  tree.within[node] = within;
  tree.links[node] = static_cast<int16_t>(links);
  tree.above[node] = static_cast<int16_t>(above);
}

// Writes depths, by one warp. Depth is -1 if the path is broken or too long. Returns true if all are reachable.
__device__ __forceinline__ bool write_depths(const BuildTreesParams& p, TreeShared& tree, int64_t begin,
                                             int32_t num_nodes) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  bool all = true;
  for (int32_t node = lane; node - lane < num_nodes; node += 32) {
    if (node < num_nodes) {
      const int32_t above = tree.above[node], from = above >= 0 ? tree.depths[above] : 0;
      const int32_t depth = from + tree.links[node];
      const bool reachable = above != kBrokenLink && from >= 0 && depth <= p.max_depth;
      tree.depths[node] = static_cast<int16_t>(reachable ? depth : -1);
      p.trees.depths[begin + node] = reachable ? depth : -1;
      all = all && reachable;
    }
    __syncwarp();
  }
  return all;
}

// Writes a block's mask rows: each lane builds its node's row, then all lanes write coalesced words.
__device__ __forceinline__ void write_masks(const BuildTreesParams& p, TreeShared& tree, int64_t begin, int32_t node,
                                            int32_t num_nodes) {
  auto& masks = reinterpret_cast<BlockMasks*>(&tree + 1)[threadIdx.x / 32].rows;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), block = node - lane;
  int32_t from = node < num_nodes && tree.depths[node] >= 0 ? node : -1;
  for (int32_t w = p.trees.mask_words - 1; w >= 0; --w) {
    const bool is_there = from >= 0 && from / kMaskWordBits == w;
    masks[lane][w] = is_there ? static_cast<int32_t>(tree.within[from]) : 0;
    if (is_there) from = tree.above[from];
  }
  __syncwarp();
  int32_t* const words = p.trees.mask + (begin + block) * p.trees.mask_words;
  const int32_t count = min_of(num_nodes - block, 32) * p.trees.mask_words;
  for (int32_t i = lane; i < count; i += 32) words[i] = masks[i / p.trees.mask_words][i % p.trees.mask_words];
  __syncwarp();
}

__device__ __forceinline__ void write_links(const BuildTreesParams& p, TreeShared& tree, int64_t begin,
                                            int32_t num_nodes) {
  const TreeOutput& trees = p.trees;
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  for (int32_t node = lane; node - lane < num_nodes; node += 32) {
    const bool is_there = node < num_nodes && tree.depths[node] >= 0;
    append_children(trees, begin, is_there, node, is_there ? tree.parents[node] : -1, tree.last_child);
    if (node < num_nodes && !is_there) trees.first_child[begin + node] = trees.next_sibling[begin + node] = -1;
  }
}

__device__ __forceinline__ void build_one(const BuildTreesParams& p, int64_t b) {
  auto& tree = ptx::shared<TreeShared>();
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  const int32_t num_nodes = static_cast<int32_t>(min_of<int64_t>(rows.size(), p.max_nodes));
  const int32_t thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  // Each warp handles whole blocks.
  for (int32_t node = thread; node - thread % 32 < num_nodes; node += threads) {
    int32_t parent = node > 0 && node < num_nodes ? p.parents[rows.begin + node] : kNothing;
    if (node > 0 && (parent < 0 || parent >= node)) parent = kBrokenLink;
    if (node < num_nodes) tree.parents[node] = static_cast<int16_t>(parent);
    climb_block(tree, node, parent, num_nodes);
  }
  __syncthreads();
  bool valid = rows.size() > 0 && rows.size() <= p.max_nodes && p.parents[rows.begin] == -1;
  if (thread < 32) valid = write_depths(p, tree, rows.begin, num_nodes) && valid;
  valid = __syncthreads_and(valid);
  // The first warp writes links while the others, if any, write masks.
  if (thread < 32) write_links(p, tree, rows.begin, num_nodes);
  if (thread >= 32 || threads == 32) {
    const int32_t first = threads == 32 ? thread : thread - 32, step = max_of(threads - 32, 32);
    for (int32_t node = first; node - thread % 32 < num_nodes; node += step) {
      write_masks(p, tree, rows.begin, node, num_nodes);
    }
  }
  for (int64_t row = rows.begin + num_nodes + thread; row < rows.end; row += threads) clear_node(p.trees, row);
  if (thread == 0) p.trees.valid[b] = valid;
}

// One CTA per tree. The last CTAs clear rows outside all trees, the padding of a fixed-shape batch.
__global__ void __launch_bounds__(kMaxThreads, 1) build_trees_kernel(const __grid_constant__ BuildTreesParams p) {
  if (blockIdx.x < p.batch) return build_one(p, blockIdx.x);
  const NodeRange used = used_rows(p.cu_nodes, p.batch, p.num_rows);
  const int64_t stride = int64_t{gridDim.x - static_cast<unsigned>(p.batch)} * blockDim.x;
  for (int64_t row = (blockIdx.x - p.batch) * blockDim.x + threadIdx.x; row < p.num_rows; row += stride) {
    if (row < used.begin || row >= used.end) clear_node(p.trees, row);
  }
}

}  // namespace

void CudaBackend::build_trees(const BuildTreesParams& p, const ExecContext& ctx) const {
  constexpr int64_t kPaddingCtas = 4;
  const int64_t threads = min_of<int64_t>(ceil_div(p.max_nodes, 32) * 32, kMaxThreads);
  const size_t shared_bytes = sizeof(TreeShared) + static_cast<size_t>(threads / 32) * sizeof(BlockMasks);
  launch(build_trees_kernel, dim3(static_cast<unsigned>(p.batch + kPaddingCtas)), dim3(static_cast<unsigned>(threads)),
         shared_bytes, ctx.stream, p);
}

}  // namespace pagedtree::cuda
