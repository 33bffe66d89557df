#include "core/tree.h"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kMaxThreads = 256;

struct TreeShared {
  int16_t parents[kMaxTreeNodes];  // -1: no such link
  bool reachable[kMaxTreeNodes];
};

// The number of links to the root, -1 if the way is broken or longer than max_depth.
__device__ __forceinline__ int32_t depth_of(const TreeShared& tree, int32_t node, int32_t max_depth) {
  int32_t depth = 0;
  while (node > 0 && depth <= max_depth) {
    node = tree.parents[node];
    ++depth;
  }
  return node == 0 && depth <= max_depth ? depth : -1;
}

// Looks for children and siblings among the later nodes.
__device__ __forceinline__ void write_links(const BuildTreesParams& p, const TreeShared& tree, int64_t row,
                                            int32_t node, int32_t num_nodes) {
  int32_t child = -1, sibling = -1;
  for (int32_t other = node + 1; other < num_nodes && (child < 0 || sibling < 0); ++other) {
    if (!tree.reachable[other]) continue;
    if (child < 0 && tree.parents[other] == node) child = other;
    if (sibling < 0 && node > 0 && tree.parents[other] == tree.parents[node]) sibling = other;
  }
  p.first_child[row] = child;
  p.next_sibling[row] = sibling;
}

__device__ __forceinline__ void build_one(const BuildTreesParams& p, int64_t b) {
  auto& tree = ptx::shared<TreeShared>();
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  const int32_t num_nodes = static_cast<int32_t>(min_of<int64_t>(rows.size(), p.max_nodes));
  for (int32_t node = threadIdx.x; node < num_nodes; node += blockDim.x) {
    const int32_t parent = node == 0 ? -1 : p.parents[rows.begin + node];
    tree.parents[node] = static_cast<int16_t>(parent >= 0 && parent < node ? parent : -1);
  }
  __syncthreads();
  bool valid = rows.size() > 0 && rows.size() <= p.max_nodes && p.parents[rows.begin] == -1;
  for (int32_t node = threadIdx.x; node < num_nodes; node += blockDim.x) {
    const int32_t depth = depth_of(tree, node, p.max_depth);
    p.depths[rows.begin + node] = depth;
    tree.reachable[node] = depth >= 0;
    valid = valid && depth >= 0;
  }
  valid = __syncthreads_and(valid);
  for (int64_t row = rows.begin + threadIdx.x; row < rows.end; row += blockDim.x) {
    const int64_t node = row - rows.begin;
    if (node < num_nodes && tree.reachable[node]) {
      write_ancestors(p.mask + row * p.mask_words, p.mask_words, tree.parents, static_cast<int32_t>(node));
      write_links(p, tree, row, static_cast<int32_t>(node), num_nodes);
    } else {
      clear_node(p, row);
    }
  }
  if (threadIdx.x == 0) p.valid[b] = valid;
}

// The first CTAs take one tree each, the others the rows that belong to no tree (the padding of a fixed-shape batch).
__global__ void __launch_bounds__(kMaxThreads, 1) build_trees_kernel(const __grid_constant__ BuildTreesParams p) {
  if (blockIdx.x < p.batch) return build_one(p, blockIdx.x);
  const NodeRange used = used_rows(p.cu_nodes, p.batch, p.num_rows);
  const int64_t stride = int64_t{gridDim.x - static_cast<unsigned>(p.batch)} * blockDim.x;
  for (int64_t row = (blockIdx.x - p.batch) * blockDim.x + threadIdx.x; row < p.num_rows; row += stride) {
    if (row < used.begin || row >= used.end) clear_node(p, row);
  }
}

}  // namespace

void CudaBackend::build_trees(const BuildTreesParams& p, const ExecContext& ctx) const {
  constexpr int64_t kPaddingCtas = 4;
  const int64_t threads = min_of<int64_t>(ceil_div(p.max_nodes, 32) * 32, kMaxThreads);
  launch(build_trees_kernel, dim3(static_cast<unsigned>(p.batch + kPaddingCtas)), dim3(static_cast<unsigned>(threads)),
         sizeof(TreeShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
