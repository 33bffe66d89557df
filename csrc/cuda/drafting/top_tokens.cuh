// The best tokens of a row of logits, and the normaliser of its softmax. A whole CTA works on one row.
#pragma once

#include "cuda/filters.cuh"

namespace pagedtree::cuda {

// Leaves the `count` best tokens in shared.best, best first; returns how many are above -inf.
template <DType kDType>
__device__ __forceinline__ int32_t top_tokens(const LogitReader<kDType>& row, int32_t count, BestShared& shared) {
  const LogitItems<LogitReader<kDType>> items{row, {0.0f, 1.0f}, -kInfinity};
  return list_best(shared, items, items.digits(), count);
}

struct SumShared {
  double of_block[kRowThreads / 16];
  double total;
};

// The sum of exp(logit - peak), with the same bits as on the CPU: each block has sixteen partial sums, which are added
// in order, then the blocks are.
template <DType kDType>
__device__ __forceinline__ double sum_exp(const LogitReader<kDType>& row, float peak, SumShared& shared) {
  constexpr int kPartials = 16;
  constexpr int64_t kBlock = 1024;
  const int64_t num_blocks = ceil_div(row.vocab(), kBlock);
  const int64_t groups = blockDim.x / kPartials, group = threadIdx.x / kPartials, lane = threadIdx.x % kPartials;
  double total = 0.0;  // only the first thread's counts
  for (int64_t first = 0; first < num_blocks; first += groups) {
    const int64_t begin = (first + group) * kBlock, end = min_of(begin + kBlock, row.vocab());
    float partial = 0.0f;
    for (int64_t token = begin + lane; token < end; token += kPartials) {
      partial += exp_exact<ScalarMath>(row.logit(token) - peak);
    }
    double of_block = 0.0;
    for (int i = 0; i < kPartials; ++i) of_block += static_cast<double>(__shfl_sync(~0u, partial, i, kPartials));
    if (lane == 0) shared.of_block[group] = of_block;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int64_t i = 0; i < min_of(groups, num_blocks - first); ++i) total += shared.of_block[i];
      shared.total = total;
    }
    __syncthreads();
  }
  return shared.total;
}

}  // namespace pagedtree::cuda
