// Sums integers: shuffles, shared memory, then one CTA adds all partial sums.
#pragma once

#include "bugs.h"
#include "cuda/tile/ptx.cuh"

namespace probe {

constexpr int kReduceThreads = 256;

struct ReduceParams {
  const int32_t* values;  // [count]
  int count;
  unsigned* arrived;   // [1] 0
  unsigned* partials;  // [gridDim.x]
  unsigned* sum;       // [1] 0
  Bug bug;
};

struct ReduceShared {
  unsigned warps[kReduceThreads / 32];
};

// Returns true in the last of `count` CTAs to arrive at `counter`, which then sees all CTAs' earlier writes. For all
// threads of a CTA. The counter starts at 0, where the last CTA resets it.
__device__ __forceinline__ bool arrive_is_last(unsigned* counter, unsigned count) {
  // Orders all writes before the release, and the acquire before all reads.
  __syncthreads();
  const bool first_thread = threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
  const bool is_last = first_thread && pagedtree::ptx::fetch_add(counter, 1) == count - 1;
  if (is_last) *counter = 0;
  return __syncthreads_or(is_last) != 0;
}

__global__ void __launch_bounds__(kReduceThreads) reduce(const __grid_constant__ ReduceParams p) {
  auto& s = pagedtree::ptx::shared<ReduceShared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += gridDim.x * blockDim.x) {
    sum += static_cast<unsigned>(p.values[i]);
  }
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_down_sync(~0u, sum, delta);
  if (lane == 0) s.warps[warp] = sum;
  if (p.bug != Bug::kNoReductionBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kReduceThreads / 32; ++w) sum += s.warps[w];
    if (p.bug == Bug::kMergeRace) {
      *p.sum += sum;
    } else {
      p.partials[blockIdx.x] = sum;
    }
  }
  if (p.bug == Bug::kMergeRace) return;
  const bool joins = p.bug == Bug::kMergeByFirst ? blockIdx.x == 0 : arrive_is_last(p.arrived, gridDim.x);
  if (joins && threadIdx.x == 0) {
    unsigned total = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) total += p.partials[b];
    *p.sum = total;
  }
}

}  // namespace probe
