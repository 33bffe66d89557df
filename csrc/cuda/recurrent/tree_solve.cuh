// The triangular system of a tree, by each warp for its 32 columns alone: 16 or 32 tokens at a time take what they get
// from earlier ones, then follow each other. A lane has 8 columns of one token of each tile. A token's sums go along
// its path from the root down.
#pragma once

#include "cuda/recurrent/tree.cuh"

namespace pagedtree::cuda {

// 8 neighbours in shared memory.
__device__ __forceinline__ void load_eight(float (&x)[8], const float* from) {
  const float4 first = *reinterpret_cast<const float4*>(from), second = *reinterpret_cast<const float4*>(from + 4);
  x[0] = first.x, x[1] = first.y, x[2] = first.z, x[3] = first.w;
  x[4] = second.x, x[5] = second.y, x[6] = second.z, x[7] = second.w;
}

// Weights of 4 tokens for one token of each tile.
template <int kTiles>
struct FourWeights {
  float4 keys[kTiles], queries[kTiles];

  __device__ __forceinline__ FourWeights(const Tree& t, int32_t m, int first_tile) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile < first_tile) continue;
      const int32_t row = tile * kTile + static_cast<int32_t>(threadIdx.x) % 32 / 4;
      keys[tile] = *reinterpret_cast<const float4*>(t.weights_of(0, row) + m);
      queries[tile] = *reinterpret_cast<const float4*>(t.weights_of(1, row) + m);
    }
  }
  static __device__ __forceinline__ float part(const float4& x, int j) {
    return j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
  }
};

// Adds u of a token to the sums of a tile's tokens, with its weights for them.
template <int kTiles>
__device__ __forceinline__ void add_weighed(Sums<kTiles>& sums, int tile, float key, float query, const float (&u)[8],
                                            bool to_left, bool to_out) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float left = __fmaf_rn(-key, u[e], sums.left[tile][e]), out = __fmaf_rn(query, u[e], sums.out[tile][e]);
    sums.left[tile][e] = to_left ? left : sums.left[tile][e];
    sums.out[tile][e] = to_out ? out : sums.out[tile][e];
  }
}

// Adds what tokens get from the 8 tokens of an earlier block, whose u are finite: weights of 0 do no harm.
template <int kTiles>
__device__ __forceinline__ void add_block(const Tree& t, int32_t block, Sums<kTiles>& sums) {
  const float* const from = t.u + block * kTile * kTreeColumns + threadIdx.x % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const FourWeights<kTiles> weights(t, block * kTile + half * 4, 0);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float u[8];
      load_eight(u, from + (half * 4 + m) * kTreeColumns);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        add_weighed(sums, tile, weights.part(weights.keys[tile], m), weights.part(weights.queries[tile], m), u, true,
                    true);
      }
    }
  }
}

// The same where some are not: what is no ancestor has no part in a sum.
template <int kTiles>
__device__ __forceinline__ void add_infinite_block(const Tree& t, int32_t begin, int32_t block, Sums<kTiles>& sums) {
#pragma unroll 1
  for (int32_t m = block * kTile; m < block * kTile + kTile; ++m) {
    float u[8];
    load_eight(u, t.u + m * kTreeColumns + threadIdx.x % 4 * 8);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int32_t row = tile * kTile + static_cast<int32_t>(threadIdx.x) % 32 / 4;
      if (begin + row >= t.count || (t.shared.masks[begin + row] >> m & 1) == 0) continue;
      add_weighed(sums, tile, t.weights_of(0, row)[m], t.weights_of(1, row)[m], u, t.p.beta != nullptr, true);
    }
  }
}

// Solves the tokens of the tiles from `begin` on and writes their outputs. `infinite`: a bit for each block that
// has a u which is no number.
template <typename T, int kTiles>
__device__ __forceinline__ void solve_tree(const Tree& t, int32_t begin, Sums<kTiles>& sums, uint32_t& infinite) {
  const DeltaRuleParams& p = t.p;
  const int32_t lane = threadIdx.x % 32, quad = lane / 4, column = lane % 4 * 8;
  uint64_t all = 0;
  uint32_t near[kTiles], above[kTiles];  // the path of the lane's token from `begin` on; what its u depends on
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int32_t i = begin + tile * kTile + quad;
    const uint64_t mask = i < t.count ? t.shared.masks[i] : 0;
    near[tile] = static_cast<uint32_t>(mask >> begin);
    above[tile] = p.beta != nullptr ? near[tile] & ~(1u << (tile * kTile + quad)) : 0;
    all |= mask;
  }
  for (int32_t block = 0; block < begin / kTile; ++block) {
    if (!__any_sync(~0u, (all >> block * kTile & 0xff) != 0)) continue;
    if ((infinite >> block & 1) == 0) {
      add_block(t, block, sums);
    } else {
      add_infinite_block(t, begin, block, sums);
    }
  }
  const bool is_last = begin + t.together >= t.count;
#pragma unroll
  for (int own = 0; own < kTiles; ++own) {
    if (begin + own * kTile >= t.count) break;
    const int32_t first = begin + own * kTile, i = first + quad;
    const float beta = i < t.count ? t.shared.betas[i] : 1.0f;
    float u[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const FourWeights<kTiles> weights(t, first + half * 4, own);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = half * 4 + j;
        if (first + m >= t.count) break;
        float of_m[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          u[e] = sums.left[own][e] * beta;
          of_m[e] = __shfl_sync(~0u, u[e], m * 4 + lane % 4);
        }
#pragma unroll
        for (int tile = own; tile < kTiles; ++tile) {
          const uint32_t bit = 1u << (own * kTile + m);
          add_weighed(sums, tile, weights.part(weights.keys[tile], j), weights.part(weights.queries[tile], j), of_m,
                      (above[tile] & bit) != 0, (near[tile] & bit) != 0);
        }
      }
    }
    const bool is_reachable = near[own] != 0;
    if (!is_last) {
      float zero = 0.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (!is_reachable) u[e] = 0.0f;
        zero = __fmaf_rn(u[e], 0.0f, zero);
      }
      if (__any_sync(~0u, zero != 0.0f)) infinite |= 1u << first / kTile;
      float4* const to = reinterpret_cast<float4*>(t.u + i * kTreeColumns + column);
      to[0] = make_float4(u[0], u[1], u[2], u[3]);
      to[1] = make_float4(u[4], u[5], u[6], u[7]);
    }
    if (i >= t.count || t.column + column >= p.value_dim) continue;
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t pair = pack_pair<T>(sums.out[own][e * 2] * p.scale, sums.out[own][e * 2 + 1] * p.scale);
      words[e] = is_reachable ? pair : 0;
    }
    *outputs(p, t.first_row + i, t.head, t.column + column) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace pagedtree::cuda
