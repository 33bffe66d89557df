#include "cuda/drafting/packing.cuh"
#include "cuda/tile/block.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kThreads = 256;

// One CTA: batches are small.
__global__ void __launch_bounds__(kThreads, 1) pack_kernel(const __grid_constant__ PackParams p) {
  auto& shared = ptx::shared<BlockShared>();
  ptx::wait_for_kernels_before();
  uint64_t before = 0;
  for (int64_t first = 0; first < p.batch; first += kThreads) {
    const int64_t b = first + threadIdx.x;
    uint64_t total;
    const uint64_t size = b < p.batch ? static_cast<uint64_t>(p.cu_nodes[b + 1]) : 0;
    const uint64_t end = before + block_scan(shared, size, total);
    if (b < p.batch) p.cu_nodes[b + 1] = static_cast<int32_t>(end);
    before += total;
  }
  if (threadIdx.x == 0) p.cu_nodes[0] = 0;
  for (int64_t row = static_cast<int64_t>(before) + threadIdx.x; row < p.num_rows; row += kThreads) {
    p.draft_tokens[row] = -1;
    p.parents[row] = -1;
    if (p.node_map != nullptr) p.node_map[row] = -1;
  }
}

}  // namespace

void pack_trees(const PackParams& p, const ExecContext& ctx) {
  launch_behind(pack_kernel, dim3(1), dim3(kThreads), sizeof(BlockShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
