// (Q K^T) V over pages without softmax: a producer warp (TMA, or cp.async with Q in registers), a wgmma warpgroup,
// mbarriers between.
#pragma once

#include "cuda/tile/ptx_sm90.cuh"
#include "scores.cuh"

namespace probe {

constexpr int kStages = 2, kHopperKeys = 64, kHopperPage = 16, kConsumers = 128;
constexpr uint32_t kTileBytes = kHopperKeys * 128 * 2;

struct HopperParams {
  const Element *q, *k, *v;  // [64, 128], [pages, kHopperPage, 128]; TMA uses maps
  float* out;                // [64, 128]
  const int32_t* pages;      // [tiles * kHopperKeys / kHopperPage]
  int tiles;
  Bug bug;
};

// 128 columns are two panels of 64, 128 bytes wide.
struct HopperShared {
  alignas(1024) Element q[2][64 * 64];
  Element k[kStages][2][kHopperKeys * 64];
  Element v[kStages][2][kHopperKeys * 64];
  uint64_t full[kStages], empty[kStages], q_full;
};

__device__ inline void produce(HopperShared& s, const pagedtree::ptx::TensorMap* q, const pagedtree::ptx::TensorMap* k,
                               const pagedtree::ptx::TensorMap* v, const HopperParams& p) {
  namespace ptx = pagedtree::ptx;
  ptx::mbar_arrive_expect(&s.q_full, kTileBytes);
  for (int h = 0; h < 2; ++h) ptx::tma_load_5d(s.q[h], q, h * 64, 0, 0, 0, 0, &s.q_full);
  const int loads = p.bug == Bug::kUnawaitedLoad ? p.tiles + 1 : p.tiles;
  for (int t = 0; t < loads; ++t) {
    const int stage = t % kStages;
    if (p.bug != Bug::kNoEmptyWait) ptx::mbar_wait(&s.empty[stage], (t / kStages & 1) ^ 1);
    ptx::mbar_arrive_expect(&s.full[stage], 2 * kTileBytes - (p.bug == Bug::kShortExpect ? 64 : 0));
    for (int i = 0; i < kHopperKeys / kHopperPage; ++i) {
      const int page = p.pages[t % p.tiles * (kHopperKeys / kHopperPage) + i];
      for (int h = 0; h < 2; ++h) {
        ptx::tma_load_5d(s.k[stage][h] + i * kHopperPage * 64, k, h * 64, 0, 0, 0, page, &s.full[stage]);
        ptx::tma_load_5d(s.v[stage][h] + i * kHopperPage * 64, v, h * 64, 0, 0, 0, page, &s.full[stage]);
      }
    }
  }
}

// For all lanes of the warp.
__device__ inline void produce_by_copies(HopperShared& s, const HopperParams& p) {
  namespace ptx = pagedtree::ptx;
  for (int t = 0; t < p.tiles; ++t) {
    const int stage = t % kStages;
    ptx::mbar_wait(&s.empty[stage], (t / kStages & 1) ^ 1);
    for (int i = threadIdx.x % 32; i < kHopperKeys * 16; i += 32) {  // 16 bytes each
      const int row = i / 16, panel = i % 16 / 8, column = i % 8;
      const int page = p.pages[t * (kHopperKeys / kHopperPage) + row / kHopperPage];
      const size_t from = (size_t(page) * kHopperPage + row % kHopperPage) * 128 + i % 16 * 8;
      const int to = row * 64 + (column ^ row % 8) * 8;
      ptx::cp_async_16(ptx::smem_addr(s.k[stage][panel] + to), p.k + from);
      ptx::cp_async_16(ptx::smem_addr(s.v[stage][panel] + to), p.v + from);
    }
    ptx::cp_async_mbar_arrive(&s.full[stage]);
  }
}

__device__ inline uint32_t pack_pair(float a, float b) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  uint32_t word;
  memcpy(&word, &both, sizeof(both));
  return word;
}

template <bool kCopies>
__device__ inline void consume(HopperShared& s, const HopperParams& p) {
  namespace ptx = pagedtree::ptx;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float o[16][4] = {};
  uint32_t q[8][4];
  if constexpr (kCopies) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = warp * 16 + lane / 4 + i % 2 * 8, column = i / 4 * 16 + lane % 4 * 2 + i / 2 % 2 * 8;
      memcpy(&q[i / 4][i % 4], p.q + row * 128 + column, sizeof(uint32_t));
    }
  } else {
    ptx::mbar_wait(&s.q_full, 0);
  }
  for (int t = 0; t < p.tiles; ++t) {
    const int stage = t % kStages;
    float x[8][4];
    const int parity = p.bug == Bug::kNoPhaseFlip ? 0 : t / kStages & 1;
    ptx::mbar_wait(&s.full[stage], parity);
    if (kCopies && p.bug != Bug::kNoProxyFence) ptx::fence_proxy_async();
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      const uint64_t k = ptx::matrix_descriptor(s.k[stage][d / 4] + d % 4 * 16, 16, 1024);
      if constexpr (kCopies) {
        ptx::wgmma_rs<Element, 64, false>(x, q[d], k, d > 0);
      } else {
        ptx::wgmma_ss<Element, 64>(x, ptx::matrix_descriptor(s.q[d / 4] + d % 4 * 16, 16, 1024), k, d > 0);
      }
    }
    ptx::wgmma_commit();
    const bool early = p.bug == Bug::kBufferBackEarly || p.bug == Bug::kStageBackEarly;
    if (early) ptx::mbar_arrive(&s.empty[stage]);
    ptx::wgmma_wait<0>();
    uint32_t a[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[n][r] = pack_pair(x[n * 2 + r / 2][r % 2 * 2], x[n * 2 + r / 2][r % 2 * 2 + 1]);
      }
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      ptx::wgmma_rs<Element, 128, true>(
          o, a[n], ptx::matrix_descriptor(s.v[stage][0] + n * 16 * 64, sizeof(s.v[0][0]), 1024), true);
    }
    ptx::wgmma_commit();
    if (p.bug != Bug::kNoWgmmaWait) ptx::wgmma_wait<0>();
    if (!early) ptx::mbar_arrive(&s.empty[stage]);
  }
  if (p.bug == Bug::kNoWgmmaWait) ptx::wgmma_wait<0>();
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      p.out[(warp * 16 + lane / 4 + r / 2 * 8) * 128 + n * 8 + lane % 4 * 2 + r % 2] = o[n][r];
    }
  }
}

template <bool kCopies>
__global__ void __launch_bounds__(kConsumers + 32)
    hopper(const __grid_constant__ pagedtree::ptx::TensorMap q, const __grid_constant__ pagedtree::ptx::TensorMap k,
           const __grid_constant__ pagedtree::ptx::TensorMap v, const __grid_constant__ HopperParams p) {
  namespace ptx = pagedtree::ptx;
  auto& s = ptx::shared<HopperShared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(&s.full[i], kCopies ? 32 : 1);
      ptx::mbar_init(&s.empty[i], kConsumers);
    }
    ptx::mbar_init(&s.q_full, 1);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    ptx::setmaxnreg_dec<24>();
    if constexpr (kCopies) {
      produce_by_copies(s, p);
    } else if (threadIdx.x == kConsumers) {
      produce(s, &q, &k, &v, p);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    consume<kCopies>(s, p);
  }
}

}  // namespace probe
