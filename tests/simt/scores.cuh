// Sums q . k over the keys of pages for 64 rows q, with the parts of attention where faults are likely: double-buffered
// cp.async, swizzle, ldmatrix, mma, shuffles.
#pragma once

#include "bugs.h"
#include "cuda/tile/ptx.cuh"

namespace probe {

using Element = __nv_bfloat16;
constexpr int kDim = 128, kRows = 64, kKeys = 64, kWarps = 4, kPageSize = 16;
constexpr int kChunks = kDim / 8;  // of 16 bytes per row

struct ScoresParams {
  const Element* q;      // [kRows, kDim]
  const Element* k;      // [pages, kPageSize, kDim]
  float* out;            // [kRows]
  const int32_t* pages;  // [tiles * kKeys / kPageSize]
  int tiles;
  Bug bug;
};

struct ScoresShared {
  alignas(128) Element k[2][kKeys * kDim];
};

// Returns the offset of row r's chunk c, spread over the banks.
__device__ inline int swizzle(int r, int c, Bug bug) {
  return (r * kChunks + (bug == Bug::kNoSwizzle ? c : c ^ (r & 7))) * 8;
}

__device__ inline void load_tile(const ScoresParams& p, Element* to, int tile) {
  for (int i = threadIdx.x; i < kKeys * kChunks; i += kWarps * 32) {
    const int r = i / kChunks, c = i % kChunks, key = tile * kKeys + r;
    const int page = p.pages[key / kPageSize + (p.bug == Bug::kTableOverrun)];
    const Element* from = p.k + (int64_t{page} * kPageSize + key % kPageSize) * kDim + c * 8;
    if (p.bug == Bug::kMisalignedCopy && key == 3) from += 1;
    pagedtree::ptx::cp_async_16(pagedtree::ptx::smem_addr(to + swizzle(r, c, p.bug)), from);
  }
}

__global__ void __launch_bounds__(kWarps * 32) scores(const __grid_constant__ ScoresParams p) {
  namespace ptx = pagedtree::ptx;
  auto& s = ptx::shared<ScoresShared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (p.bug == Bug::kEarlyExit && warp == 3) return;
  uint32_t q[kDim / 16][4];
  for (int i = 0; i < kDim / 4; ++i) {
    const int row = warp * 16 + lane / 4 + i % 2 * 8, column = i / 4 * 16 + lane % 4 * 2 + i / 2 % 2 * 8;
    memcpy(&q[i / 4][i % 4], p.q + row * kDim + column, sizeof(uint32_t));
  }
  load_tile(p, s.k[0], 0);
  ptx::cp_async_commit();

  float total[2] = {};  // of rows lane / 4 and lane / 4 + 8
  for (int t = 0; t < p.tiles; ++t) {
    const bool last = t + 1 == p.tiles;
    if (!last) {
      load_tile(p, s.k[(t + 1) & 1], t + 1);
      if (p.bug != Bug::kNoCommit) ptx::cp_async_commit();
    }
    if (last && p.bug != Bug::kShortWait) {
      ptx::cp_async_wait<0>();
    } else if (p.bug != Bug::kNoWait) {
      ptx::cp_async_wait<1>();
    }
    if (p.bug == Bug::kDivergentBarrier && last && warp == 3) {
      __syncthreads();
    } else if (p.bug != Bug::kNoBarrierBeforeRead) {
      __syncthreads();
    }
    for (int d = 0; d < kDim / 16; ++d) {
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        float x[2][4] = {};
        const int row = n * 16 + lane % 8 + lane / 16 * 8;
        ptx::ldmatrix_x4(b, ptx::smem_addr(s.k[t & 1] + swizzle(row, d * 2 + lane / 8 % 2, p.bug)));
        ptx::mma_m16n8k16<Element>(x[0], q[d], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(x[1], q[d], b[2], b[3]);
        for (int i = 0; i < 8; ++i) total[i / 2 % 2] += x[i / 4][i % 4];
      }
    }
    if (p.bug != Bug::kNoBarrierBeforeRefill) __syncthreads();
  }
  for (int h = 0; h < 2; ++h) {
    if (p.bug != Bug::kShuffleLacksLanes || lane < 28) total[h] += __shfl_xor_sync(~0u, total[h], 1);
    total[h] += __shfl_xor_sync(~0u, total[h], 2);
    if (lane % 4 == 0) p.out[warp * 16 + lane / 4 + h * 8] = total[h];
  }
}

}  // namespace probe
