// The state behind a path of at most 16 tokens, with one decay for each head. A warp keeps 16 columns in registers: the
// state is read once and written once. Products and sums are those of the other kernels, so that bits are the same.
#pragma once

#include "cuda/recurrent/tree.cuh"

namespace pagedtree::cuda {

constexpr int kPathTokens = 2 * kTile;  // at most
constexpr int kPathWarps = 4,
              kPathColumns = 16;  // of a warp; a lane has 4 neighbours of them, for a token of each tile
constexpr int kPathSteps = kTreeChannels / kStep;

struct PathShared {
  alignas(16) uint16_t keys[kPathTokens][kRowStride];  // zeros behind the last token and the last channel
  alignas(16) float u[kPathWarps][kPathTokens][kPathColumns];
  float norms[kPathTokens];
};

// A lane's elements of the warp's columns: channels 4 pair .. 4 pair + 3 of each step, columns 2 quad and 2 quad + 1.
template <StateWords kWords>
struct StateColumns {
  float x[kPathSteps][4][2];
  float* begin;  // null where there are none
  int64_t channel_stride, column_stride;
  int32_t channels;  // from the lane's first one on

  __device__ __forceinline__ StateColumns(const DeltaRuleParams& p, int64_t b, int32_t head, int32_t first_column) {
    const int32_t lane = threadIdx.x % 32, column = first_column + lane / 4 * 2, channel = lane % 4 * 4;
    const int64_t index = state_index_of(p.tokens, b);
    channel_stride = p.state_strides[2];
    column_stride = p.state_strides[3];
    channels = p.key_dim - channel;
    begin = index < 0 || column >= p.value_dim ? nullptr
                                               : p.state + index * p.state_strides[0] + head * p.state_strides[1] +
                                                     channel * channel_stride + column * column_stride;
  }
  // f(the neighbours in memory, as many elements of x) for each word.
  template <typename F>
  __device__ __forceinline__ void each_word(const F& f) {
    if (begin == nullptr) return;
#pragma unroll
    for (int step = 0; step < kPathSteps; ++step) {
      if (step * kStep >= channels) break;
      float* const from = begin + step * kStep * channel_stride;
#pragma unroll
      for (int j = 0; j < (kWords == StateWords::kOfColumns ? 4 : 2); ++j) {
        if constexpr (kWords == StateWords::kOfColumns) {
          f(*reinterpret_cast<float2*>(from + j * channel_stride), x[step][j][0], x[step][j][1]);
        } else {
          f(*reinterpret_cast<float4*>(from + j * column_stride), x[step][0][j], x[step][1][j], x[step][2][j],
            x[step][3][j]);
        }
      }
    }
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int e = 0; e < kPathSteps * 8; ++e) x[e / 8][e / 2 % 4][e % 2] = 0.0f;
    each_word(Load{});
  }
  __device__ __forceinline__ void store() { each_word(Store{}); }

 private:
  struct Load {
    __device__ __forceinline__ void operator()(const float2& word, float& a, float& b) const {
      const float2 copy = word;
      a = copy.x, b = copy.y;
    }
    __device__ __forceinline__ void operator()(const float4& word, float& a, float& b, float& c, float& d) const {
      const float4 copy = word;
      a = copy.x, b = copy.y, c = copy.z, d = copy.w;
    }
  };
  struct Store {
    __device__ __forceinline__ void operator()(float2& word, float a, float b) const { word = make_float2(a, b); }
    __device__ __forceinline__ void operator()(float4& word, float a, float b, float c, float d) const {
      word = make_float4(a, b, c, d);
    }
  };
};

// Copies the keys, whose lanes have the tokens' rows, and finds their norms.
__device__ __forceinline__ void copy_keys(const DeltaRuleParams& p, PathShared& shared, int32_t head, int32_t row,
                                          int32_t count) {
  constexpr int kWords = kTreeChannels / 8;
  const int32_t lane = threadIdx.x % 32, word = threadIdx.x % kWords;
  const auto* const keys = static_cast<const uint16_t*>(p.k) + head / p.group_size * p.k_head_stride + word * 8;
#pragma unroll
  for (int32_t first = 0; first < kPathTokens; first += kPathWarps * 32 / kWords) {
    const int32_t token = first + static_cast<int32_t>(threadIdx.x) / kWords;
    const int64_t of_token = __shfl_sync(~0u, row, token);
    const bool valid = token < count && word * 8 < p.key_dim;
    const uint16_t* const from = valid ? keys + of_token * p.k_token_stride : static_cast<const uint16_t*>(p.k);
    uint16_t* const to = shared.keys[token] + word * 8;
    if (!valid) {
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    } else if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      ptx::cp_async_16(ptx::smem_addr(to), from);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8; ++e) to[e] = from[e];
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
#pragma unroll 1
  for (int32_t token = threadIdx.x / 32; token < count; token += kPathWarps) {
    float norm = 1.0f;
    if (p.l2norm) {
      const Four x = unpack(*reinterpret_cast<const uint2*>(shared.keys[token] + lane * 4), p.dtype);
      norm = norm_of(p, warp_sum(dot(x, x, 0.0f)));
    }
    if (lane == 0) shared.norms[token] = norm;
  }
  __syncthreads();
}

// One CTA for each sequence, value head and 16 columns for each of its warps.
template <typename T, StateWords kWords>
__global__ void __launch_bounds__(kPathWarps * 32, 3)
    advance_path_kernel(const __grid_constant__ DeltaRuleParams p, int32_t column_blocks) {
  auto& shared = ptx::shared<PathShared>();
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, pair = lane % 4;
  const int32_t block = static_cast<int32_t>(blockIdx.x), item = block / column_blocks;
  const int32_t b = item / p.num_heads, head = item % p.num_heads;
  const int32_t first_column = (block % column_blocks * kPathWarps + warp) * kPathColumns;
  StateColumns<kWords> state(p, b, head, first_column);
  state.load();
  const int32_t count = replayed_tokens(p.tokens, b);
  if (count == 0) return;
  const bool is_long = count > kTile;

  // A lane has what each token has once, and what lanes of its quad share for tokens quad and 8 + quad.
  const int32_t row = static_cast<int32_t>(replayed_row(p.tokens, b, min_of(lane, count - 1)));
  const float beta = p.beta != nullptr ? p.beta[row * p.beta_token_stride + head * p.beta_head_stride] : 1.0f;
  int64_t sum = fixed_point(p.g[row * p.g_token_stride + head * p.g_head_stride]);
  Four left[2]{};
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int32_t column = first_column + pair * 4, of_token = __shfl_sync(~0u, row, tile * kTile + quad);
    if (tile * kTile + quad >= count || column >= p.value_dim) continue;
    left[tile] = load_four_halves(p.v, p.dtype, of_token * p.v_token_stride + head * p.v_head_stride + column);
  }
  copy_keys(p, shared, head, row, count);
#pragma unroll
  for (int delta = 1; delta < kPathTokens; delta *= 2) {
    const int64_t before = __shfl_up_sync(~0u, sum, delta);
    if (lane >= delta) sum += before;
  }
  const int64_t total = __shfl_sync(~0u, sum, count - 1);

  float weights[2][2][2]{};  // [tile of the later token, of the earlier one, which of two neighbours]
  if (p.beta != nullptr) {
    float high[2][4]{}, low[2][4]{}, products[2][4]{};  // with columns 2 x + n of the product's columns n; with keys
#pragma unroll
    for (int step = 0; step < kPathSteps; ++step) {
      if (step * kStep >= p.key_dim) break;
      const int32_t channel = step * kStep + pair * 4;
      const TokenPairs rows{*reinterpret_cast<const uint2*>(shared.keys[quad] + channel),
                            *reinterpret_cast<const uint2*>(shared.keys[kTile + quad] + channel)};
      const StepRows a = rows_of(rows, kTypeOf<T>);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int half = part / 2, n = part % 2;
        add_split_product(high[n], low[n], a.a[half], state.x[step][half * 2][n], state.x[step][half * 2 + 1][n]);
      }
      add_key_product<T>(products[0], rows, rows.key);
      if (is_long) add_key_product<T>(products[1], rows, rows.query);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile == 1 && !is_long) break;
      const int32_t i = tile * kTile + quad;
      const float norm = shared.norms[i];
      const int64_t of_i = __shfl_sync(~0u, sum, i);
      const float decay = decay_between(of_i, 0);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float product = joined(high[e % 2][tile * 2 + e / 2], low[e % 2][tile * 2 + e / 2]);
        left[tile].x[e] -= decayed(product, norm, decay);
      }
#pragma unroll
      for (int j = 0; j < 2 * (tile + 1); ++j) {
        const int32_t m = j / 2 * kTile + pair * 2 + j % 2;
        const float between = decay_between(of_i, __shfl_sync(~0u, sum, m));
        weights[tile][j / 2][j % 2] = decayed(products[j / 2][tile * 2 + j % 2], norm * shared.norms[m], between);
      }
    }
  }

#pragma unroll 1
  for (int32_t m = 0; m < count; ++m) {
    const bool own = m >= kTile, odd = m % 2 != 0;
    const float beta_of_m = __shfl_sync(~0u, beta, m);
    float u[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      u[e] = __shfl_sync(~0u, own ? left[1].x[e] : left[0].x[e], m % kTile * 4 + pair) * beta_of_m;
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float even_weight = own ? weights[tile][1][0] : weights[tile][0][0];
      const float odd_weight = own ? weights[tile][1][1] : weights[tile][0][1];
      const float weight = __shfl_sync(~0u, odd ? odd_weight : even_weight, quad * 4 + m % kTile / 2);
      if (p.beta == nullptr || tile * kTile + quad <= m) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) left[tile].x[e] = __fmaf_rn(-weight, u[e], left[tile].x[e]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int32_t i = tile * kTile + quad;
    const float beta_of_i = __shfl_sync(~0u, beta, i);
    const float factor = shared.norms[i] * decay_between(total, __shfl_sync(~0u, sum, i));
    float u[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) u[e] = i < count ? left[tile].x[e] * beta_of_i * factor : 0.0f;
    *reinterpret_cast<float4*>(shared.u[warp][i] + pair * 4) = make_float4(u[0], u[1], u[2], u[3]);
  }
  __syncwarp();

  float high[2][4], low[2][4];  // of u: rows are columns of the state, of 8 tokens each
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float u = shared.u[warp][e / 4 * kTile + pair + e % 4 / 2 * 4][quad * 2 + e % 2];
    high[e / 4][e % 4] = high_part(u);
    low[e / 4][e % 4] = u - high_part(u);
  }
  const float decay = decay_between(total, 0);
#pragma unroll
  for (int step = 0; step < kPathSteps; ++step) {
    if (step * kStep >= p.key_dim) break;
    float sums[2][4]{}, of_low[2][4]{};  // of channels 2 x + n of the product's columns
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile == 1 && !is_long) break;
      const auto keys = [&](int32_t token) {
        return *reinterpret_cast<const uint32_t*>(shared.keys[tile * kTile + token] + step * kStep + quad * 2);
      };
      const Four b = unpack(make_uint2(keys(pair), keys(pair + 4)), kTypeOf<T>);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ptx::mma_m16n8k8(sums[n], high[tile], b.x[n], b.x[2 + n]);
        ptx::mma_m16n8k8(of_low[n], low[tile], b.x[n], b.x[2 + n]);
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int n = e / 4, c = e % 4;
      const float added = joined(sums[n][c], of_low[n][c]);
      float& x = state.x[step][c % 2 * 2 + n][c / 2];
      x = decay == 0.0f ? added : __fmaf_rn(decay, x, added);
    }
  }
  state.store();
}

}  // namespace pagedtree::cuda
