// At most 16 tokens with one decay for each head: the outputs of a tree, or the state behind a path. A warp has 16
// columns of the state in registers from their only load to their only store. Products and sums are those of the other
// kernels, so that bits are the same.
#pragma once

#include "cuda/recurrent/tree.cuh"

namespace pagedtree::cuda {

constexpr int kFewTokens = 2 * kTile;           // at most
constexpr int kFewWarps = 4, kFewColumns = 16;  // of a warp; a lane has 4 neighbours of them, for a token of each tile
constexpr int kFewSteps = kTreeChannels / kStep;

struct FewShared {
  alignas(16) uint16_t rows[2][kFewTokens][kRowStride];  // keys, queries; zeros behind the last token and channel
  alignas(16) float u[kFewWarps][kFewTokens][kFewColumns];
  float norms[2][kFewTokens];
};

// A lane's elements of the warp's columns: channels 4 pair .. 4 pair + 3 of each step, columns 2 quad and 2 quad + 1.
template <StateWords kWords>
struct StateColumns {
  float x[kFewSteps][4][2];
  float* begin;      // null where there are none
  int32_t channels;  // from the lane's first one on

  __device__ __forceinline__ StateColumns(const DeltaRuleParams& p, int64_t b, int32_t head, int32_t first_column) {
    const int32_t lane = threadIdx.x % 32, column = first_column + lane / 4 * 2, channel = lane % 4 * 4;
    const int64_t index = state_index_of(p.tokens, b);
    channels = p.key_dim - channel;
    begin = index < 0 || column >= p.value_dim ? nullptr
                                               : p.state + index * p.state_strides[0] + head * p.state_strides[1] +
                                                     channel * p.state_strides[2] + column * p.state_strides[3];
  }
  // Copies a step's words from or to memory.
  template <bool kStores>
  __device__ __forceinline__ void copy(const DeltaRuleParams& p, int step) {
    if (begin == nullptr || step * kStep >= channels) return;
    float* const at = begin + step * kStep * p.state_strides[2];
    float (&of)[4][2] = x[step];
#pragma unroll
    for (int j = 0; j < (kWords == StateWords::kOfColumns ? 4 : 2); ++j) {
      if constexpr (kWords == StateWords::kOfColumns) {
        auto* const word = reinterpret_cast<float2*>(at + j * p.state_strides[2]);
        const float2 numbers = kStores ? make_float2(of[j][0], of[j][1]) : *word;
        if (kStores) *word = numbers;
        of[j][0] = numbers.x, of[j][1] = numbers.y;
      } else {
        auto* const word = reinterpret_cast<float4*>(at + j * p.state_strides[3]);
        const float4 numbers = kStores ? make_float4(of[0][j], of[1][j], of[2][j], of[3][j]) : *word;
        if (kStores) *word = numbers;
        of[0][j] = numbers.x, of[1][j] = numbers.y, of[2][j] = numbers.z, of[3][j] = numbers.w;
      }
    }
  }
  __device__ __forceinline__ void load(const DeltaRuleParams& p) {
#pragma unroll
    for (int e = 0; e < kFewSteps * 8; ++e) x[e / 8][e / 2 % 4][e % 2] = 0.0f;
#pragma unroll
    for (int step = 0; step < kFewSteps; ++step) copy<false>(p, step);
  }
};

// What a lane has of token `lane`.
struct FewTokens {
  int32_t count, row;
  uint32_t mask = 0;  // the tokens of its path, itself included; none where it cannot be reached
  float g = 0.0f, beta = 1.0f;
  int64_t sum = 0;  // of g from the root on

  template <bool kAdvances>
  static __device__ __forceinline__ FewTokens of(const DeltaRuleParams& p, int32_t b, int32_t head,
                                                 const NodeRange& rows) {
    const int32_t lane = threadIdx.x % 32,
                  size = static_cast<int32_t>(min_of<int64_t>(rows.size(), p.tokens.max_nodes));
    FewTokens t{kAdvances ? replayed_tokens(p.tokens, b) : size, static_cast<int32_t>(rows.begin) + lane};
    if (lane >= t.count) return t;
    if (kAdvances) t.row = static_cast<int32_t>(replayed_row(p.tokens, b, lane));
    t.mask = 1u << lane;
    t.g = p.g[t.row * p.g_token_stride + head * p.g_head_stride];
    if (p.beta != nullptr) t.beta = p.beta[t.row * p.beta_token_stride + head * p.beta_head_stride];
    return t;
  }
  // In each round a token takes over what is known at the end of its own stretch of the path.
  template <bool kAdvances>
  __device__ __forceinline__ void link(const DeltaRuleParams& p, const NodeRange& rows) {
    const int32_t lane = threadIdx.x % 32;
    int32_t above = lane >= count ? -2 : kAdvances ? lane - 1 : linked_parent(p.tokens, rows.begin, lane);
    sum = fixed_point(g);
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
};

// Starts the copies of keys and queries.
template <bool kAdvances>
__device__ __forceinline__ void copy_rows(const DeltaRuleParams& p, FewShared& shared, int32_t head,
                                          const FewTokens& tokens) {
  constexpr int kWords = kTreeChannels / 8, kKinds = kAdvances ? 1 : 2;
  const int32_t word = threadIdx.x % kWords;
#pragma unroll
  for (int which = 0; which < kKinds; ++which) {
    const int64_t stride = which == 0 ? p.k_token_stride : p.q_token_stride;
    const auto* const first = static_cast<const uint16_t*>(which == 0 ? p.k : p.q) +
                              head / p.group_size * (which == 0 ? p.k_head_stride : p.q_head_stride) + word * 8;
#pragma unroll
    for (int32_t begin = 0; begin < kFewTokens; begin += kFewWarps * 32 / kWords) {
      const int32_t token = begin + static_cast<int32_t>(threadIdx.x) / kWords;
      const int64_t row = __shfl_sync(~0u, tokens.row, token);
      uint16_t* const to = shared.rows[which][token] + word * 8;
      const uint16_t* const from = first + row * stride;
      if (token >= tokens.count || word * 8 >= p.key_dim) {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      } else if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
        ptx::cp_async_16(ptx::smem_addr(to), from);
      } else {
#pragma unroll 1
        for (int e = 0; e < 8; ++e) to[e] = from[e];
      }
    }
  }
  ptx::cp_async_commit();
  if (threadIdx.x < 2 * kFewTokens) shared.norms[threadIdx.x / kFewTokens][threadIdx.x % kFewTokens] = 1.0f;
}

// For l2norm; a warp for each row.
__device__ __forceinline__ void find_norms(const DeltaRuleParams& p, FewShared& shared) {
  const int32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t at = threadIdx.x / 32; at < (p.out == nullptr ? 1 : 2) * kFewTokens; at += kFewWarps) {
    const int32_t which = at / kFewTokens, token = at % kFewTokens;
    const Four x = unpack(*reinterpret_cast<const uint2*>(shared.rows[which][token] + lane * 4), p.dtype);
    const float norm = norm_of(p, warp_sum(dot(x, x, 0.0f)));
    if (lane == 0) shared.norms[which][token] = norm;
  }
  __syncthreads();
}

// A lane's 4 columns of tokens quad and 8 + quad: what is left of their values, their outputs without the scale, and
// the weights of tokens 8 of + 2 pair + j for token `tile`, of keys and of queries.
struct FewSums {
  Four left[2], out[2];
  float weights[2][2][2][2];  // [tile, key or query, of, j]
};

// Products with the state and with the keys. Rows of a product are the keys and queries of a tile, or the keys of both.
template <typename T, bool kAdvances, StateWords kWords>
__device__ __forceinline__ void find_sums(const DeltaRuleParams& p, const FewShared& shared, const FewTokens& tokens,
                                          const StateColumns<kWords>& state, FewSums& sums) {
  const int32_t lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  const bool is_long = tokens.count > kTile;
#pragma unroll
  for (int product = 0; product < (kAdvances ? 1 : 2); ++product) {
    if (product == 1 && !is_long) break;
    float high[2][4]{}, low[2][4]{};  // columns 2 x + n of the product's columns n
    float with_keys[2][4]{};          // of each tile
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
      const int64_t path = __shfl_sync(~0u, tokens.sum, i);
      const float decay = decay_between(path, 0);
#pragma unroll
      for (int which = 0; which < (kAdvances ? 1 : 2); ++which) {
        const int first = kAdvances ? tile * 2 : which * 2;  // of the lane's numbers of a product
        const float norm = shared.norms[which][i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float read = decayed(joined(high[e % 2][first + e / 2], low[e % 2][first + e / 2]), norm, decay);
          (which == 0 ? sums.left : sums.out)[tile].x[e] = which == 0 ? left_of(p, sums.left[tile].x[e], read) : read;
        }
#pragma unroll
        for (int j = 0; j < 2 * (tile + 1); ++j) {
          const int32_t m = j / 2 * kTile + pair * 2 + j % 2;
          const float between = decay_between(path, __shfl_sync(~0u, tokens.sum, m));
          sums.weights[tile][which][j / 2][j % 2] =
              decayed(with_keys[j / 2][first + j % 2], norm * shared.norms[0][m], between);
        }
      }
    }
  }
}

// The triangular system. A token's sums go along its path from the root down.
template <bool kAdvances>
__device__ __forceinline__ void solve_few(const DeltaRuleParams& p, const FewTokens& tokens, FewSums& sums) {
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

// Stores the state with what the tokens of a path leave in it.
template <typename T, StateWords kWords>
__device__ __forceinline__ void carry_few(const DeltaRuleParams& p, FewShared& shared, const FewTokens& tokens,
                                          const FewSums& sums, StateColumns<kWords>& state) {
  const int32_t lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  const bool is_long = tokens.count > kTile;
  auto& of_warp = shared.u[threadIdx.x / 32];
  const int64_t total = __shfl_sync(~0u, tokens.sum, tokens.count - 1);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int32_t i = tile * kTile + quad;
    const float beta = __shfl_sync(~0u, tokens.beta, i);
    const float factor = shared.norms[0][i] * decay_between(total, __shfl_sync(~0u, tokens.sum, i));
    float u[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) u[e] = i < tokens.count ? sums.left[tile].x[e] * beta * factor : 0.0f;
    *reinterpret_cast<float4*>(of_warp[i] + pair * 4) = make_float4(u[0], u[1], u[2], u[3]);
  }
  __syncwarp();
  float high[2][4], low[2][4];  // of u: rows are columns of the state, of 8 tokens each
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
    float added[2][4]{}, of_low[2][4]{};  // of channels 2 x + n of the product's columns
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile == 1 && !is_long) break;
      const auto keys = [&](int32_t token) {
        return *reinterpret_cast<const uint32_t*>(shared.rows[0][tile * kTile + token] + step * kStep + quad * 2);
      };
      const Four b = unpack(make_uint2(keys(pair), keys(pair + 4)), kTypeOf<T>);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ptx::mma_m16n8k8(added[n], high[tile], b.x[n], b.x[2 + n]);
        ptx::mma_m16n8k8(of_low[n], low[tile], b.x[n], b.x[2 + n]);
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int n = e / 4, c = e % 4;
      const float sum = joined(added[n][c], of_low[n][c]);
      float& x = state.x[step][c % 2 * 2 + n][c / 2];
      x = decay == 0.0f ? sum : __fmaf_rn(decay, x, sum);
    }
    state.template copy<true>(p, step);
  }
}

// By the CTA whose columns begin at `first_column`.
template <typename T, StateWords kWords, bool kAdvances>
__device__ __forceinline__ void run_few(const DeltaRuleParams& p, int32_t head, int32_t first_column,
                                        const NodeRange& rows, FewTokens& tokens, StateColumns<kWords>& state) {
  auto& shared = ptx::shared<FewShared>();
  const int32_t quad = threadIdx.x % 32 / 4,
                column = first_column + threadIdx.x / 32 * kFewColumns + threadIdx.x % 4 * 4;
  copy_rows<kAdvances>(p, shared, head, tokens);
  uint2 values[2]{};  // unpacked later, so that nothing waits for them
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int64_t row = __shfl_sync(~0u, tokens.row, tile * kTile + quad);
    if (tile * kTile + quad >= tokens.count || column >= p.value_dim) continue;
    const auto* const from =
        static_cast<const uint16_t*>(p.v) + row * p.v_token_stride + head * p.v_head_stride + column;
    values[tile] = load_pairs(from, is_aligned(from));
  }
  tokens.link<kAdvances>(p, rows);
  ptx::cp_async_wait<0>();
  __syncthreads();
  FewSums sums{{unpack(values[0], kTypeOf<T>), unpack(values[1], kTypeOf<T>)}, {}, {}};
  if (p.l2norm) find_norms(p, shared);
  if (!kAdvances || p.beta != nullptr) find_sums<T, kAdvances>(p, shared, tokens, state, sums);
  solve_few<kAdvances>(p, tokens, sums);
  if constexpr (kAdvances) {
    carry_few<T>(p, shared, tokens, sums, state);
    return;
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int32_t i = tile * kTile + quad;
    const bool is_reachable = __shfl_sync(~0u, tokens.mask, i) != 0;
    if (i >= tokens.count || column >= p.value_dim) continue;
    const Four& out = sums.out[tile];
    const uint2 pairs = make_uint2(pack_pair<T>(out.x[0] * p.scale, out.x[1] * p.scale),
                                   pack_pair<T>(out.x[2] * p.scale, out.x[3] * p.scale));
    auto* const to = static_cast<uint16_t*>(p.out) + ((rows.begin + i) * p.num_heads + head) * p.value_dim + column;
    *reinterpret_cast<uint2*>(to) = is_reachable ? pairs : make_uint2(0, 0);
  }
}

// One CTA for each sequence, value head and 16 columns for each of its warps.
template <typename T, StateWords kWords, bool kAdvances>
__global__ void __launch_bounds__(kFewWarps * 32, 4)
    few_tokens_kernel(const __grid_constant__ DeltaRuleParams p, int32_t column_blocks) {
  const int32_t block = static_cast<int32_t>(blockIdx.x), item = block / column_blocks;
  const int32_t b = item / p.num_heads, head = item % p.num_heads;
  const int32_t first_column = block % column_blocks * kFewWarps * kFewColumns;
  StateColumns<kWords> state(p, b, head, first_column + static_cast<int32_t>(threadIdx.x) / 32 * kFewColumns);
  state.load(p);
  const NodeRange rows = node_range(p.tokens.cu_nodes, p.tokens.batch, b, p.tokens.num_rows);
  auto tokens = FewTokens::of<kAdvances>(p, b, head, rows);
  if (tokens.count > 0) run_few<T, kWords, kAdvances>(p, head, first_column, rows, tokens, state);
  if (!kAdvances) clear_others(p, b, head, first_column, kFewWarps * kFewColumns, rows.begin + tokens.count, rows.end);
}

}  // namespace pagedtree::cuda
