#include "cuda/backend.h"
#include "cuda/sampling.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, 1) sample_kernel(const __grid_constant__ SampleParams p) {
  const int64_t r = ptx::cluster_index();
  ptx::cluster_sync();
  const Draw draw =
      draw_token<kDType>(logit_row(p.logits, r), sampling_of(p.sampling, r), static_cast<uint64_t>(p.seeds[r]),
                         p.positions[r], ptx::shared<SamplingShared>());
  if (leads_cluster()) p.tokens[ptx::cluster_index()] = draw.token;
}

}  // namespace

void CudaBackend::sample(const SampleParams& p, const ExecContext& ctx) const {
  with_logit_dtype(p.logits.dtype, [&](auto dtype) {
    launch_rows(sample_kernel<dtype>, p.logits.num_rows, p.logits.vocab, most_threads_of_row(p.logits.num_rows),
                sizeof(SamplingShared), ctx.stream, p);
  });
}

}  // namespace pagedtree::cuda
