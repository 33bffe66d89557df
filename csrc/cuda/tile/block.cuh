// Reductions, scans, and sorts by all threads of a CTA (whole warps), or of a cluster after one ptx::meet_cluster().
#pragma once

#include "core/common.h"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

constexpr int kMaxWarps = 32;
constexpr int kMaxCluster = 16;

__device__ __forceinline__ bool leads_cluster() { return threadIdx.x == 0 && ptx::cluster_rank() == 0; }

// Scratch of the functions below, which synchronize before they overwrite it.
struct BlockShared {
  uint64_t warps[kMaxWarps];
  uint64_t ctas[kMaxCluster];
};

__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll 1
  for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(~0u, value, bits);
  return value;
}
// Returns the inclusive prefix sum over the lanes.
__device__ __forceinline__ uint64_t warp_scan(uint64_t value) {
#pragma unroll 1
  for (unsigned delta = 1; delta < 32; delta *= 2) {
    const uint64_t before = __shfl_up_sync(~0u, value, delta);
    if (threadIdx.x % 32 >= delta) value += before;
  }
  return value;
}

// Publishes one value per CTA in shared.ctas; `use` reads them between two cluster barriers.
template <typename Use>
__device__ __forceinline__ void exchange(BlockShared& shared, uint64_t value, Use use) {
  if (threadIdx.x < ptx::cluster_size()) *ptx::of_cta(&shared.ctas[ptx::cluster_rank()], threadIdx.x) = value;
  ptx::meet_cluster();
  use();
  ptx::meet_cluster();
}

// Return the maximum of a warp or CTA. Bits of kFlags, all below bit 32, are or-ed instead.
template <uint32_t kFlags = 0>
__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
  const uint32_t own = static_cast<uint32_t>(value >> 32), high = __reduce_max_sync(~0u, own);
  uint32_t low = __reduce_max_sync(~0u, own == high ? static_cast<uint32_t>(value) & ~kFlags : 0);
  if (kFlags != 0) low |= __reduce_or_sync(~0u, static_cast<uint32_t>(value) & kFlags);
  return uint64_t{high} << 32 | low;
}
template <uint32_t kFlags = 0>
__device__ __forceinline__ uint64_t block_max(BlockShared& shared, uint64_t value) {
  value = warp_max<kFlags>(value);
  if (blockDim.x == 32) return value;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max<kFlags>(threadIdx.x % 32 < blockDim.x / 32 ? shared.warps[threadIdx.x % 32] : 0);
}
// Returns the maximum of a cluster. Bit 31, the flag of ranked(), is or-ed. Not inlined: many calls per row.
inline __device__ __attribute__((noinline)) uint64_t cluster_max(BlockShared& shared, uint64_t value) {
  constexpr uint32_t kFlag = 1u << 31;
  value = block_max<kFlag>(shared, value);
  if (ptx::cluster_size() == 1) return value;
  exchange(shared, value, [&] {
    value = warp_max<kFlag>(threadIdx.x % 32 < ptx::cluster_size() ? shared.ctas[threadIdx.x % 32] : 0);
  });
  return value;
}

// Returns the sum over the preceding warps; `total` is the sum over all warps.
__device__ __forceinline__ uint64_t sum_before_warp(BlockShared& shared, uint64_t of_warp, uint64_t& total) {
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  uint64_t before = 0;
  total = 0;
#pragma unroll 1
  for (unsigned w = 0; w < blockDim.x / 32; ++w) {
    if (w == threadIdx.x / 32) before = total;
    total += shared.warps[w];
  }
  return before;
}

__device__ __forceinline__ uint64_t sum_before_warp_of_cluster(BlockShared& shared, uint64_t of_warp, uint64_t& total) {
  uint64_t before = sum_before_warp(shared, of_warp, total);
  if (ptx::cluster_size() == 1) return before;
  exchange(shared, total, [&] {
    total = 0;
#pragma unroll 1
    for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) {
      total += shared.ctas[rank];
      if (rank < ptx::cluster_rank()) before += shared.ctas[rank];
    }
  });
  return before;
}

__device__ __forceinline__ uint64_t block_sum(BlockShared& shared, uint64_t value) {
  uint64_t total;
  sum_before_warp(shared, warp_sum(value), total);
  return total;
}
__device__ __forceinline__ uint64_t cluster_sum(BlockShared& shared, uint64_t value) {
  uint64_t total;
  sum_before_warp_of_cluster(shared, warp_sum(value), total);
  return total;
}

// Returns the inclusive prefix sum over the CTA's threads; `total` is their sum.
__device__ __forceinline__ uint64_t block_scan(BlockShared& shared, uint64_t value, uint64_t& total) {
  value = warp_scan(value);
  return sum_before_warp(shared, __shfl_sync(~0u, value, 31), total) + value;
}

// Returns the number of preceding threads with the flag; `total` counts all threads with it.
__device__ __forceinline__ int32_t rank_in_block(BlockShared& shared, bool flag, int32_t& total) {
  const uint32_t lanes = __ballot_sync(~0u, flag);
  uint64_t sum;
  const uint64_t before = sum_before_warp(shared, static_cast<uint64_t>(popcount32(lanes)), sum);
  total = static_cast<int32_t>(sum);
  return static_cast<int32_t>(before) + popcount32(lanes & ((1u << (threadIdx.x % 32)) - 1));
}

// A warp's share of `size` items. All runs but the last have `length` items, a multiple of 32.
struct WarpRun {
  int32_t length, begin, end;
};
__device__ __forceinline__ WarpRun run_of_warp(int32_t size) {
  const uint32_t warps = blockDim.x / 32, warp = ptx::cluster_rank() * warps + threadIdx.x / 32;
  const auto length = static_cast<int32_t>(ceil_div<uint32_t>(size, ptx::cluster_size() * warps * 32) * 32);
  const int32_t begin = min_of(static_cast<int32_t>(warp) * length, size);
  return {length, begin, min_of(begin + length, size)};
}

}  // namespace pagedtree::cuda
