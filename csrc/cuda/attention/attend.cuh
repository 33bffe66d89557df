// One stage of keys against a warp's rows: S = Q K^T, online softmax, O += P V. All operands are mma fragments.
#pragma once

#include "cuda/attention/stage.cuh"

namespace pagedtree::cuda {

// A warp's accumulators for rows quad and quad + 8 of each block of 16: unnormalized output (the warp's columns),
// base-2 maximum, this lane's part of the sum.
template <typename I>
struct Accumulator {
  float out[I::kAtoms][I::kWarpColumns / 8][4];
  float maximum[I::kAtoms][2];
  float sum[I::kAtoms][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
      for (int d = 0; d < I::kWarpColumns / 8; ++d) {
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
using RowFactors = float[I::kAtoms][2];

template <typename I>
using Scores = float[I::kAtoms][I::kWarpKeys / 8][4];

// Computes S = Q K^T for the warp's rows from `row` of the tile and keys from `key` of the stage.
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
      const KeyFragments keys = load_k<typename I::Kv, typename I::KRows>(k, lane, key + n, column);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int a = 0; a < I::kAtoms; ++a) {
            ptx::mma_m16n8k16<typename I::M>(scores[a][n / 8 + i], rows[a][step], keys.b[step][i][0],
                                             keys.b[step][i][1]);
          }
        }
      }
    }
  }
}

// Replaces q.k by cap * tanh(q.k * scale / cap). The factors become 1.
template <typename I>
__device__ __forceinline__ void cap_scores(float cap, Scores<I>& dots, RowFactors<I>& factors) {
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int n = 0; n < I::kWarpKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dots[a][n][i] = cap - __fdividef(2.0f * cap, ptx::ex2(dots[a][n][i] * factors[a][i / 2]) + 1.0f);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) factors[a][half] = 1.0f;
  }
}

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

// Scales the scores of rows with large maxima; these scales become 1.
template <typename I>
__device__ __forceinline__ void round_scores(Scores<I>& scores, const Accumulator<I>& sums, RowFactors<I>& scales) {
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_large = fabsf(sums.maximum[a][half]) > 0x1p24f;
      const float scale = is_large ? scales[a][half] : 1.0f;
#pragma unroll
      for (int i = 0; i < I::kWarpKeys / 4; ++i) scores[a][i / 2][half * 2 + i % 2] *= scale;
      if (is_large) scales[a][half] = 1.0f;
    }
  }
}

// Returns the largest score of row quad + 8 * half of block a.
template <typename I>
__device__ __forceinline__ float find_top(const Scores<I>& scores, int a, int half) {
  float top = -kInfinity;
#pragma unroll
  for (int n = 0; n < I::kWarpKeys / 8; ++n) {
    top = fmaxf(top, fmaxf(scores[a][n][half * 2], scores[a][n][half * 2 + 1]));
  }
  return quad_max(top);
}

template <typename I>
__device__ __forceinline__ void find_tops(const Scores<I>& scores, RowFactors<I>& tops) {
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) tops[a][half] = find_top<I>(scores, a, half);
  }
}

// Online softmax: updates the maxima from top_of(a, half), turns scores into P = 2^(score - maximum), and sets the
// `factors` that rescale `out`. Returns true if a maximum of the warp changed. e4m3: P is half; maxima lowered by 15
// scale P by 2^15 against underflow.
template <typename I, typename Top>
__device__ __forceinline__ bool softmax(Scores<I>& scores, const Top& top_of, RowFactors<I>& scales,
                                        Accumulator<I>& sums, RowFactors<I>& factors) {
  constexpr int kTiles = I::kWarpKeys / 8;
  constexpr float kHeadroom = kIsFloat8<typename I::Kv> ? 15.0f : 0.0f;
  bool changed = false, huge = false;
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = top_of(a, half);
      const float old = sums.maximum[a][half], scale = scales[a][half];
      top = top == -kInfinity ? old : fmaxf(old, kHeadroom == 0.0f ? top * scale : __fmaf_rn(top, scale, -kHeadroom));
      sums.maximum[a][half] = top;
      // No visible key yet: a finite base keeps -inf - maximum from being NaN.
      factors[a][half] = ptx::ex2(old - (top == -kInfinity ? 0.0f : top));
      changed = changed || top != old;
      huge = huge || (fabsf(top) > 0x1p24f && top != -kInfinity);
    }
  }
  // Such a maximum's rounding could overflow 2^(score - maximum), unless the scores are rounded as well.
  if (__any_sync(kWholeWarp, huge)) round_scores<I>(scores, sums, scales);
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = sums.maximum[a][half] == -kInfinity ? 0.0f : sums.maximum[a][half];
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          scores[a][n][i] = ptx::ex2(__fmaf_rn(scores[a][n][i], scales[a][half], -base));
          sum += scores[a][n][i];
        }
      }
      sums.sum[a][half] = __fmaf_rn(sums.sum[a][half], factors[a][half], sum);
      if (PAGEDTREE_WEIGHTS_FIRST) changed = changed || !(sum >= 0.0f);  // the vote needs all of P
    }
  }
  return __any_sync(kWholeWarp, changed);
}

// With the warp's own maxima, found one at a time to save registers.
template <typename I>
__device__ __forceinline__ bool softmax(Scores<I>& scores, RowFactors<I>& scales, Accumulator<I>& sums,
                                        RowFactors<I>& factors) {
  return softmax<I>(scores, [&](int a, int half) { return find_top<I>(scores, a, half); }, scales, sums, factors);
}

template <typename I>
__device__ __forceinline__ bool softmax(Scores<I>& scores, const RowFactors<I>& tops, RowFactors<I>& scales,
                                        Accumulator<I>& sums, RowFactors<I>& factors) {
  return softmax<I>(scores, [&](int a, int half) { return tops[a][half]; }, scales, sums, factors);
}

template <typename I>
__device__ __forceinline__ void rescale(Accumulator<I>& sums, const RowFactors<I>& factors) {
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int d = 0; d < I::kWarpColumns / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.out[a][d][i] *= factors[a][i / 2];
    }
  }
}

// Packs P of 16 keys from key 8 * tile as the left operand of P V.
template <typename M, int kTiles>
__device__ __forceinline__ void pack_weights(const float (&weights)[kTiles][4], uint32_t tile, uint32_t (&rows)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = weights[tile + i / 2] + i % 2 * 2;
    rows[i] = pack_pair<M>(pair[0], pair[1]);
  }
}

// Returns the mask of a V register: fully masked V rows may hold NaN, which P = 0 would not cancel.
template <int kWords>
__device__ __forceinline__ uint32_t kept_values(const uint32_t (&seen)[kWords], uint32_t lane, uint32_t key,
                                                uint32_t i) {
  const uint32_t bits = seen[key / kMaskWordBits] >> (key % kMaskWordBits + i * 8 + lane % 4 * 2);
  return (bits & 1u ? 0x0000ffffu : 0u) | (bits & 2u ? 0xffff0000u : 0u);
}

// O += P V; with kMasked, over the keys in `seen` only.
template <bool kMasked, typename I>
__device__ __forceinline__ void add_values(const Scores<I>& weights, uint32_t v, uint32_t lane, uint32_t key,
                                           const uint32_t (&seen)[I::kWords], Accumulator<I>& sums) {
  using M = typename I::M;
#pragma unroll
  for (uint32_t n = 0; n < I::kWarpKeys; n += 16) {
    uint32_t rows[I::kAtoms][4];
#pragma unroll
    for (int a = 0; a < I::kAtoms; ++a) pack_weights<M>(weights[a], n / 8, rows[a]);
    uint32_t kept[2];
    if constexpr (kMasked) {
      for (uint32_t i = 0; i < 2; ++i) kept[i] = kept_values(seen, lane, n, i);
    }
#pragma unroll
    for (uint32_t column = 0; column < I::kWarpColumns; column += 32) {
      ValueFragments values = load_v<typename I::Kv, typename I::VRows>(v, lane, key + n, column);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if constexpr (kMasked) {
          for (int i = 0; i < 2; ++i) values.b[step][i] &= kept[i];
        }
#pragma unroll
        for (int a = 0; a < I::kAtoms; ++a) {
          ptx::mma_m16n8k16<M>(sums.out[a][column / 8 + step], rows[a], values.b[step][0], values.b[step][1]);
        }
      }
    }
  }
}

// Processes the warp's part of a stage; returns false if fully masked. Calls `start_copies` between S and softmax:
// earlier, the copies would delay reads of shared memory.
template <bool kMasked, typename I, typename StartCopies>
__device__ __forceinline__ bool attend_stage(const AttentionParams& p, Shared<I>& shared, Stage<I>& stage,
                                             uint32_t thread, int32_t first_key, float factor, Accumulator<I>& sums,
                                             const StartCopies& start_copies) {
  const uint32_t warp = thread / 32, lane = thread % 32;
  const uint32_t row = warp % I::kShape.row_warps * I::kShape.warp_rows(),
                 key = warp / I::kShape.row_warps * I::kWarpKeys;
  // Computed twice: the words would occupy registers during Q K^T.
  const auto visible_to = [&](int a) {
    const Visibility mine = shared.views[row + a * 16 + own_row(lane)].expand(p, shared.walk.tile);
    return visible_keys<I::kWords>(mine, lane, first_key + static_cast<int32_t>(key));
  };
  uint32_t seen[I::kWords] = {};
  if constexpr (kMasked) {
    uint32_t any = 0;
#pragma unroll
    for (int a = 0; a < I::kAtoms; ++a) {
      const VisibleKeys<I::kWords> keys = visible_to(a);
#pragma unroll
      for (int w = 0; w < I::kWords; ++w) seen[w] |= keys.rows[0][w] | keys.rows[1][w];
    }
#pragma unroll
    for (int w = 0; w < I::kWords; ++w) {
      seen[w] = column_or(seen[w]);
      any |= seen[w];
    }
    if (any == 0) return false;
  }
  Scores<I> scores;
  score_keys<I>(scores, ptx::smem_addr(shared.q), ptx::smem_addr(stage.k), lane, row, key);
  start_copies();
  RowFactors<I> factors;
#pragma unroll
  for (int a = 0; a < I::kAtoms; ++a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors[a][half] = I::kScalesRows ? shared.factors[row + a * 16 + half * 8 + lane / 4] : factor;
    }
  }
  if constexpr (kMasked) {
    if (p.softcap != 0.0f) cap_scores<I>(p.softcap * kLog2E, scores, factors);
#pragma unroll
    for (int a = 0; a < I::kAtoms; ++a) mask_scores(scores[a], visible_to(a), lane);
  }
  RowFactors<I> rescales;
  if (softmax<I>(scores, factors, sums, rescales)) rescale<I>(sums, rescales);
  add_values<kMasked, I>(scores, ptx::smem_addr(stage.v), lane, key, seen, sums);
  return true;
}

}  // namespace pagedtree::cuda
