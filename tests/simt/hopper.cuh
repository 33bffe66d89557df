// (Q K^T) V over pages, without a softmax: one warp loads by TMA, a warpgroup multiplies by wgmma, mbarriers between.
#pragma once

#include "bugs.h"
#include "cuda/tile/ptx_sm90.cuh"

namespace probe {

constexpr int kStages = 2, kHopperKeys = 64, kHopperPage = 16, kConsumers = 128;
constexpr uint32_t kTileBytes = kHopperKeys * 128 * 2;

struct HopperParams {
  float* out;            // [64, 128]
  const int32_t* pages;  // [tiles * kHopperKeys / kHopperPage]
  int tiles;
  Bug bug;
};

// 128 columns are two panels of 64, which are 128 bytes wide.
struct HopperShared {
  alignas(1024) __nv_bfloat16 q[2][64 * 64];
  __nv_bfloat16 k[kStages][2][kHopperKeys * 64];
  __nv_bfloat16 v[kStages][2][kHopperKeys * 64];
  uint64_t full[kStages], empty[kStages], q_full;
};

__device__ inline void produce(HopperShared& s, const pagedtree::ptx::TensorMap* q, const pagedtree::ptx::TensorMap* k,
                               const pagedtree::ptx::TensorMap* v, const HopperParams& p) {
  namespace ptx = pagedtree::ptx;
  ptx::mbar_arrive_expect(&s.q_full, kTileBytes);
  for (int h = 0; h < 2; ++h) ptx::tma_load_4d(s.q[h], q, h * 64, 0, 0, 0, &s.q_full);
  const int loads = p.bug == Bug::kUnawaitedLoad ? p.tiles + 1 : p.tiles;
  for (int t = 0; t < loads; ++t) {
    const int stage = t % kStages;
    if (p.bug != Bug::kNoEmptyWait) ptx::mbar_wait(&s.empty[stage], (t / kStages & 1) ^ 1);
    ptx::mbar_arrive_expect(&s.full[stage], 2 * kTileBytes - (p.bug == Bug::kShortExpect ? 64 : 0));
    for (int i = 0; i < kHopperKeys / kHopperPage; ++i) {
      const int page = p.pages[t % p.tiles * (kHopperKeys / kHopperPage) + i];
      for (int h = 0; h < 2; ++h) {
        ptx::tma_load_4d(s.k[stage][h] + i * kHopperPage * 64, k, h * 64, 0, 0, page, &s.full[stage]);
        ptx::tma_load_4d(s.v[stage][h] + i * kHopperPage * 64, v, h * 64, 0, 0, page, &s.full[stage]);
      }
    }
  }
}

__device__ inline void consume(HopperShared& s, const HopperParams& p) {
  namespace ptx = pagedtree::ptx;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float o[16][4] = {};
  ptx::mbar_wait(&s.q_full, 0);
  for (int t = 0; t < p.tiles; ++t) {
    const int stage = t % kStages;
    float x[8][4];
    if (p.bug != Bug::kNoFullWait) ptx::mbar_wait(&s.full[stage], t / kStages & 1);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      ptx::wgmma_ss<__nv_bfloat16, 64>(x, ptx::matrix_descriptor(s.q[d / 4] + d % 4 * 16, 16, 1024),
                                       ptx::matrix_descriptor(s.k[stage][d / 4] + d % 4 * 16, 16, 1024), d > 0);
    }
    ptx::wgmma_commit();
    if (p.bug == Bug::kBufferBackEarly) ptx::mbar_arrive(&s.empty[stage]);
    ptx::wgmma_wait<0>();
    uint32_t a[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(x[n * 2 + r / 2][r % 2 * 2], x[n * 2 + r / 2][r % 2 * 2 + 1]);
        memcpy(&a[n][r], &both, sizeof(both));
      }
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      ptx::wgmma_rs<__nv_bfloat16, 128, true>(
          o, a[n], ptx::matrix_descriptor(s.v[stage][0] + n * 16 * 64, sizeof(s.v[0][0]), 1024), true);
    }
    ptx::wgmma_commit();
    if (p.bug != Bug::kNoWgmmaWait) ptx::wgmma_wait<0>();
    if (p.bug != Bug::kBufferBackEarly) ptx::mbar_arrive(&s.empty[stage]);
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

__global__ void __launch_bounds__(kConsumers + 32)
    hopper(const __grid_constant__ pagedtree::ptx::TensorMap q, const __grid_constant__ pagedtree::ptx::TensorMap k,
           const __grid_constant__ pagedtree::ptx::TensorMap v, const __grid_constant__ HopperParams p) {
  namespace ptx = pagedtree::ptx;
  auto& s = ptx::shared<HopperShared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbar_init(&s.full[i], 1);
      ptx::mbar_init(&s.empty[i], kConsumers);
    }
    ptx::mbar_init(&s.q_full, 1);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == kConsumers) produce(s, &q, &k, &v, p);
  } else {
    ptx::setmaxnreg_inc<240>();
    consume(s, p);
  }
}

}  // namespace probe
