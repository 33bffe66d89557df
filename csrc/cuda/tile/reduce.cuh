// Reductions and scans over a warp or CTA.
#pragma once

#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

constexpr unsigned kWholeWarp = ~0u;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll 1
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(kWholeWarp, x, bits);
  return x;
}

// Reduce over the four lanes of a row of an mma accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}

// Reduces over the eight lanes of the same columns of an mma accumulator.
__device__ __forceinline__ uint32_t column_or(uint32_t x) {
  x |= __shfl_xor_sync(kWholeWarp, x, 4);
  x |= __shfl_xor_sync(kWholeWarp, x, 8);
  return x | __shfl_xor_sync(kWholeWarp, x, 16);
}

// Returns op over threads 0..i to thread i < `count`; `values` has one entry per thread and keeps the results.
template <typename T, typename Op>
__device__ T block_scan(T* values, T value, int32_t count, const Op& op) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  values[thread] = value;
  __syncthreads();
  int32_t step = 1;
#pragma unroll 1
  do {
    const bool has_left = thread >= step;
    if (has_left) value = op(values[thread - step], value);
    __syncthreads();
    values[thread] = value;
    __syncthreads();
  } while ((step *= 2) < count);
  return value;
}

}  // namespace pagedtree::cuda
