// How CTAs hand results to each other without waiting: whoever comes last goes on with what all have left.
#pragma once

#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

// To be called by all threads of the CTA. True for the last of `count` CTAs to arrive at `counter`; what all of them
// wrote before is then visible to its threads. The counter starts at 0 and is 0 again after the last one.
__device__ __forceinline__ bool arrive_is_last(unsigned* counter, unsigned count) {
  // The barrier puts what all threads wrote before the first one's release, and its acquire before what they read.
  __syncthreads();
  const bool first_thread = threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
  return __syncthreads_or(first_thread && ptx::increment(counter, count - 1) == count - 1) != 0;
}

}  // namespace pagedtree::cuda
