// Log-probabilities of tokens (core/logprobs.h).
#include "core/logprobs.h"
#include "cuda/backend.h"
#include "cuda/logits/masses.cuh"
#include "cuda/logits/options.cuh"
#include "cuda/logits/top_tokens.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kLogprobThreads = 384;  // the rules' scans

struct LogprobShared {
  RadixShared radix;
  TopShared top;
  MassColumns masses;
  RowDistribution distribution;
  MassTable sums;
};
static_assert(sizeof(LogprobShared) <= 99 << 10);  // all GPUs from sm_80

// Returns the number of logits >= `logit`, by all CTAs of the cluster.
template <DType kDType>
__device__ __forceinline__ uint64_t count_reaching(const LogitReader<kDType>& row, float logit, BlockShared& shared) {
  if (logit == -kInfinity) return static_cast<uint64_t>(row.vocab());
  const uint32_t least = order_key<ScalarMath>(logit + 0.0f);
  uint64_t reaching = 0;
  const LogitItems<LogitReader<kDType>> items{row, {0.0f, 1.0f}, -kInfinity};
  items.each(least, [&](uint32_t key, int64_t) { reaching += key >= least; });
  return cluster_sum(shared, reaching);
}

template <DType kDType>
__device__ __forceinline__ void write_logprobs(const TokenLogprobsParams& p, int64_t r, LogprobShared& shared) {
  const int64_t n = logprob_row(p, r), token = logprob_token(p, r);
  RadixShared& radix = shared.radix;
  const bool is_first = ptx::cluster_rank() == 0;
  if (is_first) write_no_logprobs(p, r, threadIdx.x, blockDim.x);
  if (n < 0) return;
  const LogitRow row = row_under<kDType>(p.options, p.logits, r, n, radix.block);
  RowDistribution& distribution = shared.distribution;
  if (threadIdx.x == 0) distribution.row = row;
  __syncthreads();
  find_distribution<kDType>(radix, shared.masses, logprob_sampling(p, r), distribution);
  MassesOfDType<kDType> masses(distribution);
  sum_blocks(masses, shared.sums, shared.sums);
  const double total = shared.sums.total(row.vocab);
  if (token >= 0) {
    const float logit = masses.row.logit(token);
    const uint64_t reaching = count_reaching(masses.row, logit, radix.block);
    if (leads_cluster()) {
      p.logprobs[r] = logprob_of(distribution, total, token, logit);
      p.ranks[r] = static_cast<int64_t>(reaching);
    }
  }
  if (p.top_n == 0) return;
  int32_t size = p.top_n;
  if (!distribution.uniform) {
    const uint32_t bound = find_peak(masses.row, p.top_n, shared.top);
    size = list_best(RowItems<LogitReader<kDType>>{masses.row}, bound, p.top_n, shared.top);
  }
  if (!is_first) return;
  for (int32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint64_t rank = shared.top.best[i];
    const int64_t at = distribution.uniform ? i : ranked_id(rank);
    p.top_tokens[r * p.top_n + i] = at;
    p.top_logprobs[r * p.top_n + i] =
        logprob_of(distribution, total, at, distribution.uniform ? 0.0f : ranked_value(rank));
  }
}

// One cluster per row.
template <DType kDType>
__global__ void __launch_bounds__(kLogprobThreads, 1)
    logprobs_kernel(const __grid_constant__ TokenLogprobsParams p, int64_t first) {
  ptx::meet_cluster();
  write_logprobs<kDType>(p, first + ptx::cluster_index(), ptx::shared<LogprobShared>());
}

}  // namespace

void CudaBackend::token_logprobs(const TokenLogprobsParams& p, const ExecContext& ctx) const {
  with_logit_dtype(dtype_under(p.options, p.logits.dtype), [&](auto dtype) {
    in_turns(p.options, p.num_tokens, [&](int64_t first, int64_t count) {
      launch_rows(logprobs_kernel<dtype>, count, p.logits.vocab, kLogprobThreads, sizeof(LogprobShared), ctx.stream, p,
                  first);
    });
  });
}

}  // namespace pagedtree::cuda
