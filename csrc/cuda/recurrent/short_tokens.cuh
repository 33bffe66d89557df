// Trees and paths of at most 16 tokens with decays per head, bitwise equal to few_tokens.cuh. A warp keeps A, C, and
// sums in registers, exchanges them by shuffles, and waits for others only for keys, queries, and norms.
#pragma once

#include "cuda/recurrent/few_tokens.cuh"

namespace pagedtree::cuda {

constexpr int kShortTokens = kTurn;  // maximum

struct ShortShared {
  alignas(16) uint16_t rows[2][kShortTokens][kRowStride];  // keys, queries; zero-padded
  alignas(16) float u[kFewWarps][kShortTokens][kFewColumns];
  float norms[2][kShortTokens];
};

// Per-lane state of token `lane`.
struct ShortTokens {
  int32_t count, row = 0;
  uint32_t mask = 0;  // path with the token itself; 0 if unreachable
  float beta = 1.0f;
  int64_t sum = 0;  // fixed-point sum of g along the path

  __device__ __forceinline__ ShortTokens(const DeltaRuleParams& p, const Sequence& sequence, int32_t head)
      : count(sequence.total) {
    const int32_t lane = threadIdx.x % 32;
    if (lane >= count) return;
    row = sequence.row(lane);
    mask = 1u << lane;
    sum = fixed_point(p.g[row * p.g_token_stride + head * p.g_head_stride]);
    if (p.beta != nullptr) beta = p.beta[row * p.beta_token_stride + head * p.beta_head_stride];
  }
  // Pointer jumping: each round doubles the reach.
  __device__ __forceinline__ void link(const Sequence& sequence) {
    const int32_t lane = threadIdx.x % 32;
    int32_t above = lane < count ? sequence.parent(lane) : -2;
#pragma unroll 1
    for (int32_t reach = 1; reach < count; reach *= 2) {
      const int32_t from = above >= 0 ? above : lane;
      const uint32_t of_mask = __shfl_sync(~0u, mask, from);
      const int64_t of_sum = __shfl_sync(~0u, sum, from);
      const int32_t further = __shfl_sync(~0u, above, from);
      if (above < 0) continue;
      mask |= of_mask;
      sum += of_sum;
      above = further;
    }
    if (above != -1) mask = 0;
  }
  __device__ __forceinline__ int64_t sum_of(int32_t i) const { return __shfl_sync(~0u, sum, i); }
};

template <bool kAdvances>
__device__ __forceinline__ void copy_rows(const DeltaRuleParams& p, ShortShared& shared, int32_t head,
                                          const ShortTokens& tokens) {
  constexpr int kWords = kFewChannels / 8;
  const int32_t word = threadIdx.x % kWords;
#pragma unroll
  for (int which = 0; which < (kAdvances ? 1 : 2); ++which) {
    const int64_t stride = which == 0 ? p.k_token_stride : p.q_token_stride;
    const auto* const first = static_cast<const uint16_t*>(which == 0 ? p.k : p.q) +
                              head / p.group_size * (which == 0 ? p.k_head_stride : p.q_head_stride);
    const bool aligned = reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride % 8 == 0;
#pragma unroll
    for (int32_t begin = 0; begin < kShortTokens; begin += kFewWarps * 32 / kWords) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x) / kWords;
      const int64_t row = __shfl_sync(~0u, tokens.row, i);
      const bool valid = i < tokens.count && word * 8 < p.key_dim;
      const uint16_t* const from = first + (valid ? row * stride + word * 8 : 0);
      uint16_t* const to = shared.rows[which][i] + word * 8;
      if (aligned) {
        ptx::cp_async_16(ptx::smem_addr(to), from, valid);
      } else {
#pragma unroll 1
        for (int e = 0; e < 8; ++e) to[e] = valid ? from[e] : uint16_t{0};
      }
    }
  }
  ptx::cp_async_commit();
}

template <bool kAdvances>
__device__ __forceinline__ void find_norms(const DeltaRuleParams& p, ShortShared& shared) {
  const int32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t at = threadIdx.x / 32; at < (kAdvances ? 1 : 2) * kShortTokens; at += kFewWarps) {
    const int32_t which = at / kShortTokens, i = at % kShortTokens;
    const Four x = unpack(*reinterpret_cast<const uint2*>(shared.rows[which][i] + lane * 4), p.dtype);
    const float norm = p.l2norm ? norm_of(p, warp_sum(dot(x, x, 0.0f))) : 1.0f;
    if (lane == 0) shared.norms[which][i] = norm;
  }
}

// FewSums, and A and C for keys 8 of + 2 pair + j and the lane's token of each tile.
struct ShortSums : FewSums {
  float weights[2][2][2][2];  // [tile, key or query, of, j]
};

// Computes products with state and keys. Rows are the keys and queries of a tile, or the keys of both tiles.
template <typename T, bool kAdvances, StateWords kWords>
__device__ __forceinline__ void find_sums(const DeltaRuleParams& p, const ShortShared& shared,
                                          const ShortTokens& tokens, const StateColumns<kWords>& state,
                                          ShortSums& sums) {
  const int32_t lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  const bool is_long = tokens.count > kTile;
#pragma unroll
  for (int product = 0; product < (kAdvances ? 1 : 2); ++product) {
    if (product == 1 && !is_long) break;
    float high[2][4]{}, low[2][4]{};  // [n]: columns 2 x + n
    float with_keys[2][4]{};          // per tile
#pragma unroll
    for (int step = 0; step < kFewSteps; ++step) {
      if (step * kStep >= p.key_dim) break;
      const auto load = [&](int which, int tile) {
        return *reinterpret_cast<const uint2*>(shared.rows[which][tile * kTile + quad] + step * kStep + pair * 4);
      };
      const TokenPairs rows{load(0, product), kAdvances ? load(0, 1) : load(1, product)};
      const StepRows a = rows_of(rows, kTypeOf<T>);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int half = part / 2, n = part % 2;
        add_split_product(high[n], low[n], a.a[half], state.x[step][half * 2][n], state.x[step][half * 2 + 1][n]);
      }
      add_key_product<T>(with_keys[0], rows, load(0, 0));
      if (product == 1 || (kAdvances && is_long)) add_key_product<T>(with_keys[1], rows, load(0, 1));
    }
#pragma unroll
    for (int tile = product; tile < (kAdvances ? 2 : product + 1); ++tile) {
      if (tile == 1 && !is_long) break;
      const int32_t i = tile * kTile + quad;
      const int64_t path = tokens.sum_of(i);
      const float decay = decay_between(path, 0);
#pragma unroll
      for (int which = 0; which < (kAdvances ? 1 : 2); ++which) {
        const int first = kAdvances ? tile * 2 : which * 2;  // accumulator index
        const float norm = shared.norms[which][i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float read = decayed(joined(high[e % 2][first + e / 2], low[e % 2][first + e / 2]), norm, decay);
          (which == 0 ? sums.left : sums.out)[tile].x[e] = which == 0 ? left_of(p, sums.left[tile].x[e], read) : read;
        }
#pragma unroll
        for (int j = 0; j < 2 * (tile + 1); ++j) {
          const int32_t m = j / 2 * kTile + pair * 2 + j % 2;
          sums.weights[tile][which][j / 2][j % 2] = decayed(with_keys[j / 2][first + j % 2], norm * shared.norms[0][m],
                                                            decay_between(path, tokens.sum_of(m)));
        }
      }
    }
  }
}

// Solves the triangular system. Sums follow each path from the root.
template <bool kAdvances>
__device__ __forceinline__ void solve_short(const DeltaRuleParams& p, const ShortTokens& tokens, ShortSums& sums) {
  const int32_t lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  const bool is_long = tokens.count > kTile;
  const uint32_t paths[2] = {__shfl_sync(~0u, tokens.mask, quad), __shfl_sync(~0u, tokens.mask, kTile + quad)};
#pragma unroll 1
  for (int32_t m = 0; m < tokens.count; ++m) {
    const bool of = m >= kTile;
    const float beta = __shfl_sync(~0u, tokens.beta, m);
    float u[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      u[e] = __shfl_sync(~0u, of ? sums.left[1].x[e] : sums.left[0].x[e], m % kTile * 4 + pair) * beta;
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile == 1 && !is_long) break;
      const bool is_above = (paths[tile] >> m & 1) != 0, is_itself = tile * kTile + quad == m;
#pragma unroll
      for (int which = 0; which < (kAdvances ? 1 : 2); ++which) {
        const auto& weights = sums.weights[tile][which];
        const float first = of ? weights[1][0] : weights[0][0], second = of ? weights[1][1] : weights[0][1];
        const float weight = __shfl_sync(~0u, m % 2 == 0 ? first : second, quad * 4 + m % kTile / 2);
        if (!is_above || (which == 0 && (is_itself || p.beta == nullptr))) continue;
        Four& sum = which == 0 ? sums.left[tile] : sums.out[tile];
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.x[e] = __fmaf_rn(which == 0 ? -weight : weight, u[e], sum.x[e]);
      }
    }
  }
}

// Stores S = D(last, 0) S0 + sum of D(last, m) k[m] u[m]^T.
template <typename T, StateWords kWords>
__device__ __forceinline__ void carry_short(const DeltaRuleParams& p, ShortShared& shared, const ShortTokens& tokens,
                                            const ShortSums& sums, StateColumns<kWords>& state) {
  const int32_t lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  auto& of_warp = shared.u[threadIdx.x / 32];
  const int64_t total = tokens.sum_of(tokens.count - 1);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int32_t i = tile * kTile + quad;
    const float beta = __shfl_sync(~0u, tokens.beta, i);
    const float factor = shared.norms[0][i] * decay_between(total, tokens.sum_of(i));
    float u[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) u[e] = i < tokens.count ? sums.left[tile].x[e] * beta * factor : 0.0f;
    *reinterpret_cast<float4*>(of_warp[i] + pair * 4) = make_float4(u[0], u[1], u[2], u[3]);
  }
  __syncwarp();
  float high[2][4], low[2][4];  // tf32 parts of u; rows are columns of the state, per 8 tokens
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float u = of_warp[e / 4 * kTile + pair + e % 4 / 2 * 4][quad * 2 + e % 2];
    high[e / 4][e % 4] = high_part(u);
    low[e / 4][e % 4] = u - high_part(u);
  }
  const float decay = decay_between(total, 0);
#pragma unroll
  for (int step = 0; step < kFewSteps; ++step) {
    if (step * kStep >= p.key_dim) break;
    float added[2][4]{}, of_low[2][4]{};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile == 1 && tokens.count <= kTile) break;
      const auto keys = [&](int32_t i) {
        return *reinterpret_cast<const uint32_t*>(shared.rows[0][tile * kTile + i] + step * kStep + quad * 2);
      };
      add_keys<T>(added, of_low, high[tile], low[tile], keys(pair), keys(pair + 4));
    }
    add_to_state(state.x[step], added, of_low, decay);
    state.template copy<true>(p, step, state.x[step]);
  }
}

// One CTA per sequence, value head, and 64 columns.
template <typename T, StateWords kWords, bool kAdvances>
__global__ void __launch_bounds__(kFewWarps * 32, 4)
    short_tokens_kernel(const __grid_constant__ DeltaRuleParams p, int32_t column_blocks) {
  const int32_t block = static_cast<int32_t>(blockIdx.x), item = block / column_blocks;
  const int32_t b = item / p.num_heads, head = item % p.num_heads;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, quad = static_cast<int32_t>(threadIdx.x) % 32 / 4;
  const int32_t first_column = block % column_blocks * kFewWarps * kFewColumns;
  const int32_t column = first_column + warp * kFewColumns + static_cast<int32_t>(threadIdx.x) % 4 * 4;
  StateColumns<kWords> state(p, b, head, first_column + warp * kFewColumns);
  state.load(p);
  const Sequence sequence(p, b);
  if (!kAdvances) clear_others(p, sequence, head, first_column);
  ShortTokens tokens(p, sequence, head);
  if (tokens.count == 0) return;
  auto& shared = ptx::shared<ShortShared>();
  copy_rows<kAdvances>(p, shared, head, tokens);
  uint2 values[2]{};  // unpacked late to keep the loads in flight
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int64_t row = __shfl_sync(~0u, tokens.row, tile * kTile + quad);
    if (tile * kTile + quad >= tokens.count || column >= p.value_dim) continue;
    const auto* const from =
        static_cast<const uint16_t*>(p.v) + row * p.v_token_stride + head * p.v_head_stride + column;
    values[tile] = load_pairs(from, is_aligned(from));
  }
  tokens.link(sequence);
  ptx::cp_async_wait<0>();
  __syncthreads();
  find_norms<kAdvances>(p, shared);
  __syncthreads();
  ShortSums sums{{{unpack(values[0], kTypeOf<T>), unpack(values[1], kTypeOf<T>)}, {}}, {}};
  if (!kAdvances || p.beta != nullptr) find_sums<T, kAdvances>(p, shared, tokens, state, sums);
  solve_short<kAdvances>(p, tokens, sums);
  if constexpr (kAdvances) {
    carry_short<T>(p, shared, tokens, sums, state);
  } else {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int32_t i = tile * kTile + quad;
      const bool is_reachable = __shfl_sync(~0u, tokens.mask, i) != 0;
      if (i >= tokens.count || column >= p.value_dim) continue;
      store_output<T>(p, sequence.begin + i, head, column, is_reachable, sums.out[tile]);
    }
  }
}

}  // namespace pagedtree::cuda
