// Wide values (MLA on mma.sync): one stage of keys against all rows of the tile. Q K^T is divided among four warps by
// halves of keys and of depth, so that K is read from shared memory once; partners add their sums, and each warp owns 8
// keys. P V is divided by columns, with P in shared memory.
#pragma once

#include "cuda/attention/attend.cuh"
#include "cuda/attention/stage_wide.cuh"

namespace pagedtree::cuda {

// Computes S for 8 keys per warp. The stage is in place; partners synchronize once.
template <typename I>
__device__ __forceinline__ void score_wide_keys(const AttentionParams& p, Shared<I>& shared, uint32_t k,
                                                Scores<I>& scores) {
  using M = typename I::M;
  const uint32_t thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32;
  const uint32_t keys = warp / 2 * 16, half = warp % 2, depth = half * 32;  // of each 64 columns
  const uint32_t q = ptx::smem_addr(shared.q);
  // [step]: two sums, as an mma waits for the last one into its sum.
  float dots[2][I::kAtoms][2][4] = {};
#pragma unroll
  for (uint32_t column = 0; column < I::kHeadDim; column += 64) {
    if (column >= I::kHeadDimV && p.head_dim <= I::kHeadDimV) break;
    const KeyFragments fragments = load_k<typename I::Kv, typename I::KRows>(k, lane, keys, column + depth);
#pragma unroll
    for (uint32_t step = 0; step < 2; ++step) {
#pragma unroll
      for (uint32_t a = 0; a < I::kAtoms; ++a) {
        uint32_t rows[4];
        load_q<typename I::QRows>(rows, q, lane, a * 16, column + depth + step * 16);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          ptx::mma_m16n8k16<M>(dots[step][a][n], rows, fragments.b[step][n][0], fragments.b[step][n][1]);
        }
      }
    }
  }
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
    float given[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = dots[0][a][0][i] + dots[1][a][0][i], high = dots[0][a][1][i] + dots[1][a][1][i];
      scores[a][0][i] = half == 0 ? low : high;
      given[i] = half == 0 ? high : low;
    }
    shared.dots[warp ^ 1][a][lane] = make_float4(given[0], given[1], given[2], given[3]);
  }
  ptx::barrier_sync(1 + warp / 2, 64);
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
    const float4 taken = shared.dots[warp][a][lane];
    scores[a][0][0] += taken.x;
    scores[a][0][1] += taken.y;
    scores[a][0][2] += taken.z;
    scores[a][0][3] += taken.w;
  }
}

// Softmax with P in shared memory; returns true if a maximum changed. Callers synchronize before they read P.
template <typename I>
__device__ __forceinline__ bool softmax_wide_keys(const AttentionParams& p, Shared<I>& shared, int32_t first_key,
                                                  float factor, Scores<I>& scores, Accumulator<I>& sums,
                                                  RowFactors<I>& rescales) {
  const uint32_t thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32;
  RowFactors<I> factors;
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors[a][half] = I::kScalesRows ? shared.factors[a * 16 + half * 8 + lane / 4] : factor;
    }
  }
  if (p.softcap != 0.0f) cap_scores<I>(p.softcap * kLog2E, scores, factors);
  if (!shared.bounds.is_unmasked(first_key, I::kShape.keys)) {
    const uint32_t word = keys_visible_to_lane(p, shared.walk.tile, lane, first_key) >> (warp * 8);
#pragma unroll
    for (int a = 0; a < I::kAtoms; ++a) {
      VisibleKeys<1> keys;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        keys.rows[half][0] = __shfl_sync(kWholeWarp, word, a * 16 + half * 8 + static_cast<int>(lane) / 4);
      }
      mask_scores(scores[a], keys, lane);
    }
  }
  RowFactors<I> tops;
  find_tops<I>(scores, tops);
  const auto of_row = [&](int a, int half) -> float4& { return shared.tops[a * 16 + half * 8 + lane / 4]; };
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 == 0) reinterpret_cast<float*>(&of_row(a, half))[warp] = tops[a][half];
    }
  }
  __syncthreads();
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 of_warps = of_row(a, half);
      tops[a][half] = fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w));
    }
  }
  const bool changed = softmax<I>(scores, tops, factors, sums, rescales);
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const float* pair = scores[a][0] + half * 2;
      const uint32_t offset = Shared<I>::WeightRows::offset(a * 16 + half * 8 + lane / 4, warp) + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(shared.weights + offset) = pack_pair<typename I::M>(pair[0], pair[1]);
    }
  }
  return changed;
}

// O += P V for the warp's columns.
template <typename I>
__device__ __forceinline__ void add_wide_values(Shared<I>& shared, uint32_t v, Accumulator<I>& sums) {
  using M = typename I::M;
  using Kv = typename I::Kv;
  const uint32_t thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32;
  const uint32_t weights = ptx::smem_addr(shared.weights);
  static_assert(I::kWarpColumns * sizeof(Kv) % 128 == 0, "whole panels");
  v += warp * (I::kWarpColumns * sizeof(Kv) * I::kShape.keys);
#pragma unroll
  for (uint32_t n = 0; n < I::kShape.keys; n += 16) {
    uint32_t rows[I::kAtoms][4];
#pragma unroll
    for (uint32_t a = 0; a < I::kAtoms; ++a) load_q<typename Shared<I>::WeightRows>(rows[a], weights, lane, a * 16, n);
#pragma unroll
    for (uint32_t column = 0; column < I::kWarpColumns; column += 32) {
      const ValueFragments values = load_v<Kv, typename I::KRows>(v, lane, n, column);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int a = 0; a < I::kAtoms; ++a) {
          ptx::mma_m16n8k16<M>(sums.out[a][column / 8 + step], rows[a], values.b[step][0], values.b[step][1]);
        }
      }
    }
  }
}

}  // namespace pagedtree::cuda
