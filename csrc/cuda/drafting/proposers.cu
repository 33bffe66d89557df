#include "core/drafting.h"
#include "cuda/backend.h"
#include "cuda/drafting/packing.cuh"
#include "cuda/logits/top_tokens.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kTreeThreads = 256;

// One cluster per (sequence, head).
template <DType kDType>
__global__ void __launch_bounds__(kTopThreads, kTopCtas)
    medusa_top_kernel(const __grid_constant__ MedusaProposeParams p) {
  auto& shared = ptx::shared<TopShared>();
  const uint32_t heads = static_cast<uint32_t>(max_of(p.num_heads, 1)), row = ptx::cluster_index();
  const int64_t b = row / heads, head = row % heads;
  const bool active = p.active == nullptr || p.active[b];
  if (head == 0 && leads_cluster()) p.cu_nodes[b + 1] = active ? p.num_nodes : 0;
  if (!active || p.num_heads == 0) return;
  LogitReader<kDType> reader(head_row(p, b, head));
  const uint32_t bound = find_peak(reader, p.num_top, shared);
  const int32_t size = list_best(RowItems<LogitReader<kDType>>{reader}, bound, p.num_top, shared);
  if (ptx::cluster_rank() != 0) return;
  for (int32_t k = threadIdx.x; k < p.num_top; k += blockDim.x) {
    p.top_tokens[(b * p.num_heads + head) * p.num_top + k] = k < size ? ranked_id(shared.best[k]) : -1;
  }
}

__global__ void __launch_bounds__(kTreeThreads, 1) fill_tree_kernel(const __grid_constant__ MedusaProposeParams p) {
  ptx::wait_for_kernels_before();
  const int64_t b = blockIdx.x, begin = p.cu_nodes[b];
  for (int64_t row = begin + threadIdx.x; row < p.cu_nodes[b + 1]; row += kTreeThreads) {
    const int32_t node = static_cast<int32_t>(row - begin);
    p.draft_tokens[row] = medusa_token(p, b, node);
    p.out_parents[row] = p.parents[node];
  }
}

}  // namespace

void CudaBackend::medusa_propose(const MedusaProposeParams& p, const ExecContext& ctx) const {
  const dim3 sequences(static_cast<unsigned>(p.batch));
  with_logit_dtype(p.head_logits.dtype, [&](auto dtype) {
    launch_top(medusa_top_kernel<dtype>, p.batch * max_of(p.num_heads, 1), p.head_logits.vocab, sizeof(TopShared),
               ctx.stream, p);
  });
  pack_trees({p.cu_nodes, p.draft_tokens, p.out_parents, nullptr, p.batch, p.batch * p.num_nodes}, ctx);
  launch_behind(fill_tree_kernel, sequences, dim3(kTreeThreads), 0, ctx.stream, p);
}

}  // namespace pagedtree::cuda
