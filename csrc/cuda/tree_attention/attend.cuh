// One stage of keys against a warp's rows: scores, online softmax, output.
#pragma once

#include "core/math.h"
#include "cuda/tree_attention/stage.cuh"

namespace pagedtree::cuda {

constexpr float kInfinity = __builtin_inff();

// Scores in base 2 from q.k: scale * q.k, or with a softcap cap * tanh(q.k * scale / cap).
struct ScoreLaw {
  float scale;       // positive, what is left to multiply scores with after apply()
  float tanh_scale;  // of the exponent in tanh(x) = 1 - 2 / (2^(x * 2 log2 e) + 1)
  float cap;         // 0: none
  bool negate_q;     // the sign of the scale

  __device__ __forceinline__ ScoreLaw(const TreeAttentionParams& p, int32_t kv_head) {
    float factor = p.k_scale != nullptr ? p.scale * p.k_scale[kv_head * p.k_scale_stride] : p.scale;
    negate_q = factor < 0.0f;
    factor = fabsf(factor);
    cap = p.softcap * kLog2E;
    scale = cap == 0.0f ? fmaxf(factor * kLog2E, 0x1p-126f) : 1.0f;  // not 0, which would turn -inf into NaN
    tanh_scale = cap == 0.0f ? 0.0f : factor * 2.0f * kLog2E / p.softcap;
  }

  template <int kTiles>
  __device__ __forceinline__ void apply(float (&dots)[kTiles][4]) const {
    if (cap == 0.0f) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dots[n][i] = cap - __fdividef(2.0f * cap, ptx::ex2(dots[n][i] * tanh_scale) + 1.0f);
    }
  }
};

// A warp's rows as mma accumulators: unnormalised output, maximum (base 2) and this lane's part of the sum of
// 2^(score - maximum), of rows quad and quad + 8 of each block of 16.
template <typename I>
struct Accumulator {
  float out[I::kAtoms][I::kHeadDim / 8][4];
  float maximum[I::kAtoms][2];
  float sum[I::kAtoms][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
      for (int d = 0; d < I::kHeadDim / 8; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[a][d][i] = 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[a][half] = -kInfinity;
        sum[a][half] = 0.0f;
      }
    }
  }
};

template <typename I>
using Scores = float[I::kAtoms][I::kWarpKeys / 8][4];

// q.k of the warp's rows, which begin at `row` of the tile, with its keys, which begin at `key` of the stage.
template <typename I>
__device__ __forceinline__ void score_keys(Scores<I>& scores, uint32_t q, uint32_t k, uint32_t lane, uint32_t row,
                                           uint32_t key) {
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int n = 0; n < I::kWarpKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[a][n][i] = 0.0f;
    }
  }
#pragma unroll
  for (uint32_t column = 0; column < I::kHeadDim; column += 32) {
    uint32_t rows[I::kAtoms][2][4];
#pragma unroll
    for (uint32_t a = 0; a < I::kAtoms; ++a) {
#pragma unroll
      for (uint32_t step = 0; step < 2; ++step) {
        load_q<typename I::QRows>(rows[a][step], q, lane, row + a * 16, column + step * 16);
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < I::kWarpKeys; n += 16) {
      const KeyFragments keys = load_k<typename I::T, typename I::Kv, typename I::KvRows>(k, lane, key + n, column);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int a = 0; a < I::kAtoms; ++a) {
            ptx::mma_m16n8k16<typename I::T>(scores[a][n / 8 + i], rows[a][step], keys.b[step][i][0],
                                             keys.b[step][i][1]);
          }
        }
      }
    }
  }
}

// Keys that a row does not see get no weight, whatever their score is.
template <int kTiles, int kWords>
__device__ __forceinline__ void mask_scores(float (&scores)[kTiles][4], const VisibleKeys<kWords>& keys,
                                            uint32_t lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits = keys.rows[half][w] >> (lane % 4 * 2);
#pragma unroll
      for (int n = w * 4; n < kTiles && n < w * 4 + 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((bits >> (n % 4 * 8 + i) & 1u) == 0) scores[n][half * 2 + i] = -kInfinity;
        }
      }
    }
  }
}

// Scores become weights 2^(score - maximum) under the new maximum; what was accumulated under the old one is rescaled.
template <typename I>
__device__ __forceinline__ void softmax(Scores<I>& scores, const ScoreLaw& law, Accumulator<I>& sums) {
  constexpr int kTiles = I::kWarpKeys / 8;
  float factors[I::kAtoms][2];
  bool changed = false;
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -kInfinity;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) top = fmaxf(top, fmaxf(scores[a][n][half * 2], scores[a][n][half * 2 + 1]));
      const float old = sums.maximum[a][half];
      top = quad_max(top);
      top = top == -kInfinity ? old : fmaxf(old, top * law.scale);
      // A row that has seen nothing yet: any finite number keeps -inf - maximum from being NaN.
      const float base = top == -kInfinity ? 0.0f : top;
      factors[a][half] = ptx::ex2(old - base);
      changed = changed || top != old;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          scores[a][n][i] = ptx::ex2(__fmaf_rn(scores[a][n][i], law.scale, -base));
          sum += scores[a][n][i];
        }
      }
      sums.maximum[a][half] = top;
      sums.sum[a][half] = __fmaf_rn(sums.sum[a][half], factors[a][half], sum);
    }
  }
  if (!__any_sync(kWholeWarp, changed)) return;
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int d = 0; d < I::kHeadDim / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.out[a][d][i] *= factors[a][i / 2];
    }
  }
}

// The V rows of keys that none of the warp's rows sees may hold anything: a mask for each register of a fragment.
template <int kWords>
__device__ __forceinline__ uint32_t kept_values(const uint32_t (&seen)[kWords], uint32_t lane, uint32_t key,
                                                uint32_t i) {
  const uint32_t bits = seen[key / kMaskWordBits] >> (key % kMaskWordBits + i * 8 + lane % 4 * 2);
  return (bits & 1u ? 0x0000ffffu : 0u) | (bits & 2u ? 0xffff0000u : 0u);
}

// out += weights * V; with kMasked, only of the keys in `seen`.
template <bool kMasked, typename I>
__device__ __forceinline__ void add_values(const Scores<I>& weights, uint32_t v, uint32_t lane, uint32_t key,
                                           const uint32_t (&seen)[I::kWords], Accumulator<I>& sums) {
  using T = typename I::T;
#pragma unroll
  for (uint32_t n = 0; n < I::kWarpKeys; n += 16) {
    uint32_t rows[I::kAtoms][4];
#pragma unroll
    for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = weights[a][n / 8 + i / 2] + i % 2 * 2;
        rows[a][i] = pack_pair<T>(pair[0], pair[1]);
      }
    }
    uint32_t kept[2];
    if constexpr (kMasked) {
      for (uint32_t i = 0; i < 2; ++i) kept[i] = kept_values(seen, lane, n, i);
    }
#pragma unroll
    for (uint32_t column = 0; column < I::kHeadDim; column += 32) {
      ValueFragments values = load_v<T, typename I::Kv, typename I::KvRows>(v, lane, key + n, column);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if constexpr (kMasked) {
          for (int i = 0; i < 2; ++i) values.b[step][i] &= kept[i];
        }
#pragma unroll
        for (int a = 0; a < I::kAtoms; ++a) {
          ptx::mma_m16n8k16<T>(sums.out[a][column / 8 + step], rows[a], values.b[step][0], values.b[step][1]);
        }
      }
    }
  }
}

// The warp's share of a stage whose first key is `first_key`. `views` is what the lane's own row of each block sees.
template <bool kMasked, typename I>
__device__ __forceinline__ void attend_stage(const TreeAttentionParams& p, const RowTile& tile, Shared<I>& shared,
                                             Stage<I>& stage, uint32_t thread, int32_t first_key,
                                             const RowView (&views)[I::kAtoms], const ScoreLaw& law,
                                             Accumulator<I>& sums) {
  const uint32_t warp = thread / 32, lane = thread % 32;
  const uint32_t row = warp % I::kShape.row_warps * I::kShape.warp_rows(),
                 key = warp / I::kShape.row_warps * I::kWarpKeys;
  VisibleKeys<I::kWords> keys[I::kAtoms];
  uint32_t seen[I::kWords] = {};
  if constexpr (kMasked) {
    uint32_t any = 0;
#pragma unroll
    for (int a = 0; a < I::kAtoms; ++a) {
      keys[a] = visible_keys<I::kWords>(views[a].expand(p, tile), lane, first_key + static_cast<int32_t>(key));
#pragma unroll
      for (int w = 0; w < I::kWords; ++w) seen[w] |= keys[a].rows[0][w] | keys[a].rows[1][w];
    }
#pragma unroll
    for (int w = 0; w < I::kWords; ++w) {
      seen[w] = column_or(seen[w]);
      any |= seen[w];
    }
    if (any == 0) return;
  }
  Scores<I> scores;
  score_keys<I>(scores, ptx::smem_addr(shared.q), ptx::smem_addr(stage.k), lane, row, key);
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
    law.apply(scores[a]);
    if constexpr (kMasked) mask_scores(scores[a], keys[a], lane);
  }
  softmax<I>(scores, law, sums);
  add_values<kMasked, I>(scores, ptx::smem_addr(stage.v), lane, key, seen, sums);
}

}  // namespace pagedtree::cuda
