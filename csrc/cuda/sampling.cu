#include "cuda/backend.h"
#include "cuda/options.cuh"
#include "cuda/sampling.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, 1) sample_kernel(const __grid_constant__ SampleParams p) {
  auto& shared = ptx::shared<SamplingShared>();
  ptx::cluster_sync();
  for (int64_t r = ptx::cluster_index(); r < p.logits.num_rows; r += num_clusters()) {
    const LogitRow row = row_under<kDType>(p.options, p.logits, r, r, shared.radix.block);
    const Draw draw = draw_token<kDType>(row, sampling_of(p.sampling, r), static_cast<uint64_t>(p.seeds[r]),
                                         integer_at(p.positions, r), shared);
    if (leads_cluster()) p.tokens[r] = draw.token;
    if (!kReadsOptions<kDType>) return;  // as many clusters as rows
  }
}

}  // namespace

void CudaBackend::sample(const SampleParams& p, const ExecContext& ctx) const {
  const int64_t clusters = clusters_for(p.options, p.logits.num_rows);
  with_logit_dtype(dtype_under(p.options, p.logits.dtype), [&](auto dtype) {
    launch_rows(sample_kernel<dtype>, clusters, p.logits.vocab, most_threads_of_row(clusters), sizeof(SamplingShared),
                ctx.stream, p);
  });
}

}  // namespace pagedtree::cuda
