// Sums of integers over CTAs: the last one adds partial sums, or those of a cluster read each other's shared memory.
#pragma once

#include "bugs.h"
#include "cuda/tile/ptx.cuh"

namespace probe {

struct SumParams {
  const int32_t* values;  // [count]
  int count;
  unsigned* arrived;   // [1] 0
  unsigned* partials;  // [gridDim.x]
  unsigned* sums;      // [1] 0, or [gridDim.x] of clusters
  Bug bug;
};

// Returns, in lane 0, the sum of a CTA of one warp among `ctas`.
__device__ inline unsigned sum_of_cta(const SumParams& p, unsigned cta, unsigned ctas) {
  unsigned sum = 0;
  for (int i = static_cast<int>(cta * 32 + threadIdx.x); i < p.count; i += static_cast<int>(ctas * 32)) {
    sum += static_cast<unsigned>(p.values[i]);
  }
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_down_sync(~0u, sum, delta);
  return sum;
}

__global__ void __launch_bounds__(32) sum_by_last(const __grid_constant__ SumParams p) {
  const unsigned sum = sum_of_cta(p, blockIdx.x, gridDim.x);
  if (threadIdx.x > 0) return;
  if (p.bug == Bug::kMergeRace) {
    *p.sums += sum;
    return;
  }
  p.partials[blockIdx.x] = sum;
  const bool is_last = pagedtree::ptx::fetch_add(p.arrived, 1) == gridDim.x - 1;
  if (p.bug == Bug::kMergeByFirst ? blockIdx.x > 0 : !is_last) return;
  unsigned total = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) total += p.partials[b];
  *p.sums = total;
}

__global__ void __launch_bounds__(32) sum_in_cluster(const __grid_constant__ SumParams p) {
  namespace ptx = pagedtree::ptx;
  auto& of_cta = ptx::shared<unsigned>();
  if (p.bug != Bug::kNoClusterStart) ptx::cluster_sync();
  const unsigned sum = sum_of_cta(p, ptx::cluster_rank(), ptx::cluster_size());
  if (threadIdx.x == 0) of_cta = sum;
  if (p.bug != Bug::kNoClusterBarrier && p.bug != Bug::kNoClusterStart) ptx::cluster_sync();
  if (threadIdx.x == 0) {
    unsigned total = 0;
    for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) total += *ptx::of_cta(&of_cta, rank);
    p.sums[blockIdx.x] = total;
  }
  if (p.bug != Bug::kNoClusterEnd) ptx::cluster_sync();
}

}  // namespace probe
