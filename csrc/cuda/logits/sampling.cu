#include "cuda/backend.h"
#include "cuda/logits/on_chip.h"
#include "cuda/logits/options.cuh"
#include "cuda/logits/sampling.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

// One cluster per row: all rows, or those without a token.
template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, kRowCtas)
    sample_kernel(const __grid_constant__ SampleParams p, bool all, int64_t first) {
  auto& shared = ptx::shared<SamplingShared>();
  const int64_t r = first + ptx::cluster_index();
  const bool samples = all || p.tokens[r] < 0;
  ptx::meet_cluster();  // before the token is written
  if (!samples) return;
  const LogitRow row = row_under<kDType>(p.options, p.logits, r, r, shared.radix.block);
  const Draw draw = draw_token<kDType>(row, sampling_of(p.sampling, r), static_cast<uint64_t>(p.seeds[r]),
                                       integer_at(p.positions, r), shared);
  if (leads_cluster()) p.tokens[r] = draw.token;
}

}  // namespace

void CudaBackend::sample(const SampleParams& p, const ExecContext& ctx) const {
  const bool all = !sample_on_chip(p, ctx);
  with_logit_dtype(dtype_under(p.options, p.logits.dtype), [&](auto dtype) {
    in_turns(p.options, p.logits.num_rows, [&](int64_t first, int64_t count) {
      launch_rows(sample_kernel<dtype>, count, p.logits.vocab, kRowThreads, sizeof(SamplingShared), ctx.stream, p, all,
                  first);
    });
  });
}

}  // namespace pagedtree::cuda
