#include "core/step.h"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kThreads = 128;

// One thread per query row and one per sequence.
__global__ void __launch_bounds__(kThreads, 1) prepare_step_kernel(const __grid_constant__ PrepareStepParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < p.total_q) prepare_row(p, i);
  if (i < p.batch) p.seq_lens[i] = prepared_length(p, i);
  if (i <= p.batch) p.cu_seqlens_q[i] = static_cast<int32_t>(clamp_to<int64_t>(p.cu_nodes[i], 0, p.num_rows));
}

// One thread per sequence: paths are short, and each node follows from the one before.
__global__ void __launch_bounds__(32, 1) commit_kernel(const __grid_constant__ CommitParams p) {
  const int64_t b = int64_t{blockIdx.x} * 32 + threadIdx.x;
  if (b < p.batch) commit_sequence(p, b);
}

}  // namespace

void CudaBackend::prepare_step(const PrepareStepParams& p, const ExecContext& ctx) const {
  launch(prepare_step_kernel, grid_of(max_of(p.total_q, p.batch + 1), kThreads), dim3(kThreads), 0, ctx.stream, p);
}

void CudaBackend::commit(const CommitParams& p, const ExecContext& ctx) const {
  launch(commit_kernel, grid_of(p.batch, 32), dim3(32), 0, ctx.stream, p);
}

}  // namespace pagedtree::cuda
