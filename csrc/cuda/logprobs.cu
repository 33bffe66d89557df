// Log-probabilities of tokens, see core/logprobs.h: one CTA per row.
#include "core/logprobs.h"
#include "cuda/backend.h"
#include "cuda/drafting/top_tokens.cuh"
#include "cuda/mass_sums.cuh"
#include "cuda/options.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kLogprobThreads = 384;  // as for the rules, whose scans these are

struct LogprobShared {
  BestShared best;
  FilterScratch filter;
  MassTable sums;
};

__device__ __forceinline__ void write_logprobs(const TokenLogprobsParams& p, int64_t r, LogprobShared& shared) {
  const int64_t n = logprob_row(p, r), token = logprob_token(p, r);
  const bool leads = threadIdx.x == 0;
  write_no_logprobs(p, r, threadIdx.x, blockDim.x);
  if (n < 0) return;
  const LogitRow row = row_under(p.options, p.logits, r, n, shared.best.radix.block);
  const RowDistribution distribution = find_distribution(shared.best.radix, shared.filter, row, logprob_sampling(p, r));
  const RowMasses masses(distribution);
  sum_blocks(masses, shared.sums);
  const double total = shared.sums.total(row.vocab);
  if (token >= 0) {
    const float logit = masses.row.logit(token);
    uint64_t reaching = 0;
    masses.row.each_four([&](int64_t at, const float (&four)[4]) {
      for (int i = 0; i < 4; ++i) reaching += at + i < row.vocab && four[i] >= logit;
    });
    reaching = block_sum(shared.best.radix.block, reaching);
    if (leads) {
      p.logprobs[r] = logprob_of(distribution, total, token, logit);
      p.ranks[r] = static_cast<int64_t>(reaching);
    }
  }
  if (p.top_n == 0) return;
  const int32_t size = distribution.uniform ? p.top_n : top_tokens(masses.row, p.top_n, shared.best);
  for (int32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint64_t rank = shared.best.best[i];
    const int64_t at = distribution.uniform ? i : ranked_id(rank);
    p.top_tokens[r * p.top_n + i] = at;
    p.top_logprobs[r * p.top_n + i] =
        logprob_of(distribution, total, at, distribution.uniform ? 0.0f : ranked_value(rank));
  }
}

__global__ void __launch_bounds__(kLogprobThreads, 1) logprobs_kernel(const __grid_constant__ TokenLogprobsParams p) {
  for (int64_t r = blockIdx.x; r < p.num_tokens; r += gridDim.x) {
    __syncthreads();  // all have read what the row before left in shared memory
    write_logprobs(p, r, ptx::shared<LogprobShared>());
  }
}

}  // namespace

void CudaBackend::token_logprobs(const TokenLogprobsParams& p, const ExecContext& ctx) const {
  launch(logprobs_kernel, dim3(static_cast<unsigned>(clusters_for(p.options, p.num_tokens))),
         dim3(threads_of_row(p.logits.vocab, kLogprobThreads)), sizeof(LogprobShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
