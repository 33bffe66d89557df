// Attention of up to 64 tree nodes over one head's paged context, with all fault-prone parts: double-buffered cp.async,
// swizzle, ldmatrix, mma, online softmax by shuffles.
#pragma once

#include <cmath>

#include "bugs.h"
#include "cuda/tile/ptx.cuh"

namespace probe {

using Element = __nv_bfloat16;
constexpr int kDim = 128, kRows = 64, kKeys = 64, kWarps = 4, kPageSize = 16;
constexpr int kChunks = kDim / 8;  // of 16 bytes per row

struct AttentionParams {
  const Element* q;      // [nodes, kDim]
  const Element* k;      // [pages, kPageSize, kDim]
  const Element* v;      // [pages, kPageSize, kDim]
  Element* out;          // [nodes, kDim]
  const int32_t* pages;  // [ceil((context + nodes) / kPageSize)]
  const uint64_t* sees;  // [nodes] bit j: node j is visible
  int context, nodes;
  float scale_log2;
  Bug bug;
};

struct AttentionShared {
  alignas(128) Element q[kRows * kDim];
  Element k[2][kKeys * kDim];
  Element v[2][kKeys * kDim];
};

// Returns the offset of row r's chunk c, spread over the banks.
__device__ inline int swizzle(int r, int c, Bug bug) {
  return (r * kChunks + (bug == Bug::kNoSwizzle ? c : c ^ (r & 7))) * 8;
}

__device__ inline void load_tile(const AttentionParams& p, const Element* pool, Element* to, int tile) {
  const int keys = p.context + p.nodes;
  for (int i = threadIdx.x; i < kKeys * kChunks; i += kWarps * 32) {
    const int r = i / kChunks, c = i % kChunks, key = tile * kKeys + r;
    const bool valid = key < keys;
    int page = valid || p.bug == Bug::kTableOverrun ? p.pages[key / kPageSize] : 0;
    if (p.bug == Bug::kForeignPage && valid && key / kPageSize == keys / kPageSize) ++page;
    const Element* from = pool + (int64_t{page} * kPageSize + key % kPageSize) * kDim + c * 8;
    if (p.bug == Bug::kMisalignedCopy && key == 3) from += 1;
    const int at = p.bug == Bug::kOtherSwizzle ? (r * kChunks + (c ^ (r & 3))) * 8 : swizzle(r, c, p.bug);
    if (p.bug == Bug::kTailNotZeroed && !valid) continue;
    pagedtree::ptx::cp_async_16(pagedtree::ptx::smem_addr(to + at), valid ? from : pool,
                                valid || p.bug == Bug::kTableOverrun);
  }
}

__device__ inline uint32_t pack(float a, float b) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  uint32_t word;
  memcpy(&word, &both, sizeof(word));
  return word;
}

__global__ void __launch_bounds__(kWarps * 32) attention(const __grid_constant__ AttentionParams p) {
  namespace ptx = pagedtree::ptx;
  auto& s = ptx::shared<AttentionShared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int keys = p.context + p.nodes, tiles = (keys + kKeys - 1) / kKeys;
  if (p.bug == Bug::kEarlyExit && warp == 3) return;

  for (int i = threadIdx.x; i < kRows * kChunks; i += kWarps * 32) {
    const int r = i / kChunks, c = i % kChunks;
    const bool valid = r < p.nodes;
    ptx::cp_async_16(ptx::smem_addr(s.q + swizzle(r, c, p.bug)), valid ? p.q + r * kDim + c * 8 : p.q, valid);
  }
  load_tile(p, p.k, s.k[0], 0);
  load_tile(p, p.v, s.v[0], 0);
  ptx::cp_async_commit();

  float o[kDim / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  uint32_t q[kDim / 16][4];
  for (int t = 0; t < tiles; ++t) {
    const bool last = t + 1 == tiles;
    if (!last) {
      load_tile(p, p.k, s.k[(t + 1) & 1], t + 1);
      load_tile(p, p.v, s.v[(t + 1) & 1], t + 1);
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
    for (int d = 0; d < kDim / 16 && t == 0; ++d) {
      ptx::ldmatrix_x4(q[d], ptx::smem_addr(s.q + swizzle(warp * 16 + lane % 16, d * 2 + lane / 16, p.bug)));
    }

    float x[kKeys / 8][4] = {};
    for (int d = 0; d < kDim / 16; ++d) {
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        const int row = n * 16 + lane % 8 + lane / 16 * 8;
        ptx::ldmatrix_x4(b, ptx::smem_addr(s.k[t & 1] + swizzle(row, d * 2 + lane / 8 % 2, p.bug)));
        ptx::mma_m16n8k16<Element>(x[2 * n], q[d], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(x[2 * n + 1], q[d], b[2], b[3]);
      }
    }

    for (int h = 0; h < 2; ++h) {  // rows lane / 4 and lane / 4 + 8
      const int row = warp * 16 + lane / 4 + h * 8;
      const uint64_t sees = row < p.nodes ? p.sees[row] : 0;
      float highest = top[h];
      for (int n = 0; n < kKeys / 8; ++n) {
        for (int e = 0; e < 2; ++e) {
          const int key = t * kKeys + n * 8 + lane % 4 * 2 + e;
          const bool visible = key < p.context || (key < keys && (sees >> (key - p.context) & 1) != 0);
          if (!visible) x[n][h * 2 + e] = -INFINITY;
          highest = fmaxf(highest, x[n][h * 2 + e]);
        }
      }
      if (p.bug != Bug::kShuffleLacksLanes || !last || lane < 28) {
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      }
      const float base = highest == -INFINITY ? 0.0f : highest * p.scale_log2;
      const float decay = ptx::ex2(top[h] * p.scale_log2 - base);
      float sum = 0;
      for (int n = 0; n < kKeys / 8; ++n) {
        for (int e = 0; e < 2; ++e) sum += x[n][h * 2 + e] = ptx::ex2(x[n][h * 2 + e] * p.scale_log2 - base);
      }
      top[h] = highest;
      total[h] = total[h] * decay + sum;
      for (int d = 0; d < kDim / 8; ++d) {
        o[d][h * 2] *= decay;
        o[d][h * 2 + 1] *= decay;
      }
    }

    for (int n = 0; n < kKeys / 16; ++n) {
      const uint32_t a[4] = {pack(x[2 * n][0], x[2 * n][1]), pack(x[2 * n][2], x[2 * n][3]),
                             pack(x[2 * n + 1][0], x[2 * n + 1][1]), pack(x[2 * n + 1][2], x[2 * n + 1][3])};
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, ptx::smem_addr(s.v[t & 1] + swizzle(n * 16 + lane % 16, d * 2 + lane / 16, p.bug)));
        ptx::mma_m16n8k16<Element>(o[2 * d], a, b[0], b[1]);
        ptx::mma_m16n8k16<Element>(o[2 * d + 1], a, b[2], b[3]);
      }
    }
    if (p.bug != Bug::kNoBarrierBeforeRefill) __syncthreads();
  }

  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + h * 8;
    float sum = total[h] + __shfl_xor_sync(~0u, total[h], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    for (int d = 0; d < kDim / 8 && row < p.nodes; ++d) {
      const uint32_t word = pack(o[d][h * 2] / sum, o[d][h * 2 + 1] / sum);
      *reinterpret_cast<uint32_t*>(p.out + row * kDim + d * 8 + lane % 4 * 2) = word;
    }
  }
}

}  // namespace probe
