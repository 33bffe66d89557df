// Trees and accepted paths of at most 64 tokens, 16 per turn. A warp keeps 16 columns of the state in registers between
// one load and one store. Products and sums have the order of chunk.cuh, hence the same bits.
#pragma once

#include "cuda/recurrent/state_columns.cuh"
#include "cuda/recurrent/walks.cuh"

namespace pagedtree::cuda {

constexpr int kFewTokens = 64;               // maximum
constexpr int kTile = 8, kTurn = 2 * kTile;  // tokens per mma row tile and per turn
constexpr int kFewWarps = 4;
// Strides of rows and weights: 8 rows without bank conflicts.
constexpr int kRowStride = kFewChannels + 16, kWeightStride = kFewTokens + 4;

struct FewShared : LinkedTokens<kFewTokens> {
  uint32_t masks[kFewTokens][kFewTokens / 32];
  float query_norms[kFewTokens];
};

// The launch-sized arrays behind FewShared.
struct FewSizes {
  int32_t rows{};                            // padded to whole turns
  int32_t data{}, weights{}, u{}, decays{};  // byte offsets
  int32_t bytes{};

  __host__ __device__ constexpr FewSizes(int32_t capacity, bool channel_decay) {
    rows = (capacity + kTurn - 1) / kTurn * kTurn;
    data = static_cast<int32_t>(sizeof(FewShared));
    weights = data + 2 * rows * kRowStride * 2;
    u = weights + 2 * kTurn * kWeightStride * 4;
    decays = u + kFewWarps * rows * kFewColumns * 4;
    bytes = decays + (channel_decay ? rows * kRowStride * 4 : 0);
  }
};

static_assert(sizeof(FewShared) % 16 == 0);
static_assert(FewSizes(kFewTokens, true).bytes <= 99 << 10, "what every GPU has");

struct FewTokens {
  static constexpr int kParts = 1;
  static constexpr int32_t group = kTurn;
  const DeltaRuleParams& p;
  FewShared& shared;
  int32_t count, rows;
  int32_t head, key_head;
  int32_t first_column;  // of the CTA
  uint16_t* data;        // [key or query, rows, kRowStride], zero-padded
  float* weights;        // [A or C, kTurn, kWeightStride] for the tokens of the turn
  float* u;              // [kFewWarps, rows, kFewColumns]
  float* decays;         // [rows, kRowStride]: P[n] per channel

  __device__ FewTokens(const DeltaRuleParams& params, const Sequence& sequence, int32_t capacity, int32_t of_head,
                       int32_t of_columns)
      : p(params), shared(ptx::shared<FewShared>()), count(sequence.total), head(of_head), first_column(of_columns) {
    const FewSizes sizes(capacity, p.channel_decay);
    char* const begin = reinterpret_cast<char*>(&shared);
    rows = sizes.rows;
    key_head = head / p.group_size;
    data = reinterpret_cast<uint16_t*>(begin + sizes.data);
    weights = reinterpret_cast<float*>(begin + sizes.weights);
    u = reinterpret_cast<float*>(begin + sizes.u);
    decays = reinterpret_cast<float*>(begin + sizes.decays);
  }
  // Returns the lane's first column.
  __device__ int32_t column() const {
    const uint32_t thread = ptx::thread_index();
    return first_column + static_cast<int32_t>(thread / 32 * kFewColumns + thread % 4 * 4);
  }
  __device__ uint16_t* row_of(int which, int32_t i) const { return data + (which * rows + i) * kRowStride; }
  __device__ uint2 four(int which, int32_t i, int32_t channel) const {
    return *reinterpret_cast<const uint2*>(row_of(which, i) + channel);
  }
  __device__ float* u_of(int32_t warp, int32_t i) const { return u + (warp * rows + i) * kFewColumns; }
  __device__ float* weights_of(int which, int32_t row) const { return weights + (which * kTurn + row) * kWeightStride; }
  __device__ float query_norm(int32_t begin, int32_t row) const { return shared.query_norms[begin + row]; }
  __device__ PathDecays path_decays(int32_t i) const { return {decays + i * kRowStride, p.key_dim}; }
};

__device__ __forceinline__ void clear_rows(const DeltaRuleParams& p, int32_t head, int32_t first_column, int64_t begin,
                                           int64_t end) {
  constexpr int32_t kThreads = kFewWarps * kFewColumns / 8;  // per row
  const int32_t column = first_column + threadIdx.x % kThreads * 8;
  if (column >= p.value_dim) return;
#pragma unroll 1
  for (int64_t row = begin + threadIdx.x / kThreads; row < end; row += kFewWarps * 32 / kThreads) {
    auto* const out = static_cast<uint16_t*>(p.out) + (row * p.num_heads + head) * p.value_dim + column;
    *reinterpret_cast<uint4*>(out) = make_uint4(0, 0, 0, 0);
  }
}

// Clears rows beyond a tree's limit. The first and last sequences clear rows outside all trees.
__device__ __forceinline__ void clear_others(const DeltaRuleParams& p, const Sequence& tree, int32_t head,
                                             int32_t first_column) {
  if (tree.b == 0 || tree.b + 1 == p.tokens.batch) {
    const NodeRange used = used_rows(p.tokens.cu_nodes, p.tokens.batch, p.tokens.num_rows);
    if (tree.b == 0) clear_rows(p, head, first_column, 0, used.begin);
    if (tree.b + 1 == p.tokens.batch) clear_rows(p, head, first_column, used.end, p.tokens.num_rows);
  }
  clear_rows(p, head, first_column, tree.begin + tree.total, tree.end);
}

// Issues copies of the first `size` elements of each token, kWords chunks of 8, zero-padded.
template <int32_t kWords, typename Target>
__device__ __forceinline__ void copy_rows(const FewTokens& t, const void* data, int64_t offset, int64_t token_stride,
                                          int32_t size, Target target) {
  const int32_t word = threadIdx.x % kWords, rows = ceil_div(t.count, kTurn) * kTurn;
  const uint16_t* const first = static_cast<const uint16_t*>(data) + offset;
  const bool aligned = reinterpret_cast<uintptr_t>(first) % 16 == 0 && token_stride % 8 == 0;
#pragma unroll 1
  for (int32_t i = threadIdx.x / kWords; i < rows; i += kFewWarps * 32 / kWords) {
    const bool valid = i < t.count && word * 8 < size;
    const uint16_t* const from = first + (valid ? t.shared.rows[i] * token_stride + word * 8 : 0);
    uint16_t* const to = target(i, word);
    if (aligned) {
      ptx::cp_async_16(ptx::smem_addr(to), from, valid);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8; ++e) to[e] = valid ? from[e] : uint16_t{0};
    }
  }
}

// Issues the copies of a token's inputs. v occupies the place of u.
template <bool kAdvances, bool kChannelDecay>
__device__ __forceinline__ void copy_tokens(const FewTokens& t) {
  const DeltaRuleParams& p = t.p;
#pragma unroll
  for (int which = 0; which < (kAdvances ? 1 : 2); ++which) {
    const int64_t offset = t.key_head * (which == 0 ? p.k_head_stride : p.q_head_stride);
    copy_rows<kFewChannels / 8>(t, which == 0 ? p.k : p.q, offset, which == 0 ? p.k_token_stride : p.q_token_stride,
                                p.key_dim, [&](int32_t i, int32_t word) { return t.row_of(which, i) + word * 8; });
  }
  copy_rows<kFewWarps * kFewColumns / 8>(
      t, p.v, t.head * p.v_head_stride + t.first_column, p.v_token_stride, p.value_dim - t.first_column,
      [&](int32_t i, int32_t word) { return reinterpret_cast<uint16_t*>(t.u_of(word / 2, i)) + word % 2 * 8; });
  if constexpr (kChannelDecay) {
    const int32_t channel = static_cast<int32_t>(threadIdx.x) % 32 * 4;
#pragma unroll 1
    for (int32_t i = threadIdx.x / 32; i < t.count; i += kFewWarps) {
      const float* const from = path_decays_of(p, t.shared.rows[i], t.head).products;
      const bool valid = channel < p.key_dim;
      ptx::cp_async_16(ptx::smem_addr(t.decays + i * kRowStride + channel), from + (valid ? channel : 0), valid);
    }
  }
  ptx::cp_async_commit();
}

template <bool kAdvances>
__device__ __forceinline__ void find_norms(const FewTokens& t) {
  const int32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t at = threadIdx.x / 32; at < (kAdvances ? 1 : 2) * t.count; at += kFewWarps) {
    const int32_t which = at >= t.count, i = at - which * t.count;
    const Four x = unpack(t.four(which, i, lane * 4), t.p.dtype);
    const float norm = t.p.l2norm ? norm_of(t.p, warp_sum(dot(x, x, 0.0f))) : 1.0f;
    if (lane == 0) (which == 0 ? t.shared.norms : t.shared.query_norms)[i] = norm;
  }
}

// Computes A and C for a turn. A warp's job is a product of 8 tokens with 8 keys.
template <typename T, bool kAdvances, bool kChannelDecay>
__device__ __forceinline__ void compute_turn(const FewTokens& t, int32_t begin) {
  const int32_t lane = ptx::thread_index() % 32, quad = lane / 4, pair = lane % 4, before = begin / kTile;
  const int32_t jobs = t.count - begin > kTile ? 2 * before + 3 : before + 1;
#pragma unroll 1
  for (int32_t job = threadIdx.x / 32; job < jobs; job += kFewWarps) {
    const int32_t tile = job > before, block = tile == 0 ? job : job - before - 1;
    const int32_t row = tile * kTile + quad, i = begin + row, other = block * kTile + quad;
    float sums[4] = {}, low[4] = {};
#pragma unroll 2
    for (int32_t channel = pair * 4; channel - pair * 4 < t.p.key_dim; channel += kStep) {
      const TokenPairs own{t.four(0, i, channel), t.four(!kAdvances, i, channel)};
      const uint2 keys = t.four(0, other, channel);
      if constexpr (kChannelDecay) {
        const Four decays = t.path_decays(i).four(channel);
        const StepRows rows = decayed_rows(rows_of(own, kTypeOf<T>), decays, decays);
        const Four key = undecayed(unpack(keys, kTypeOf<T>), t.path_decays(other).four(channel));
        add_exact_product(sums, low, rows.a[0], key.x[0], key.x[1]);
        add_exact_product(sums, low, rows.a[1], key.x[2], key.x[3]);
      } else {
        add_key_product<T>(sums, own, keys);
      }
    }
    float of_rows[2][2];  // [key or query, key j]; stored last: decays are computed once
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int32_t m = block * kTile + pair * 2 + j;
      const float decay = kChannelDecay ? 1.0f : decay_between(t.shared.sums[i], t.shared.sums[m]);
#pragma unroll
      for (int which = 0; which < (kAdvances ? 1 : 2); ++which) {
        const float norm = which == 0 ? t.shared.norms[i] : t.shared.query_norms[i];
        const int at = which * 2 + j;
        const float sum = kChannelDecay ? joined(sums[at], low[at]) : sums[at];
        of_rows[which][j] = decayed(sum, norm * t.shared.norms[m], decay);
      }
    }
#pragma unroll
    for (int which = 0; which < (kAdvances ? 1 : 2); ++which) {
      float* const to = t.weights_of(which, row) + block * kTile + pair * 2;
      *reinterpret_cast<float2*>(to) = make_float2(of_rows[which][0], of_rows[which][1]);
    }
  }
}

// A lane's 4 columns of tokens quad and 8 + quad: v minus its prediction (u / beta), and unscaled outputs.
struct FewSums {
  Four left[2]{}, out[2]{};
};

// Computes S0.T @ (D(n, 0) * row). A product has the keys and queries of a tile, or the keys of both tiles.
template <typename T, bool kAdvances, bool kChannelDecay, StateWords kWords>
__device__ __forceinline__ void read_state(const FewTokens& t, const StateColumns<kWords>& state, int32_t begin,
                                           FewSums& sums) {
  const int32_t lane = ptx::thread_index() % 32, quad = lane / 4, pair = lane % 4;
  const int32_t products = kAdvances || t.count - begin <= kTile ? 1 : 2;
#pragma unroll 1
  for (int32_t product = 0; product < products; ++product) {
    // Opaque to the compiler, which would hoist both tf32 parts of the whole state into registers.
    const uint32_t high_bits = kHighBits | ptx::thread_index() >> 31;
    const int32_t first = begin + product * kTile + quad, second = kAdvances ? first + kTile : first;
    float high[2][4]{}, low[2][4]{};  // [n]: columns 2 x + n
#pragma unroll
    for (int step = 0; step < kFewSteps; ++step) {
      if (step * kStep >= t.p.key_dim) break;
      const int32_t channel = step * kStep + pair * 4;
      StepRows rows = rows_of({t.four(0, first, channel), t.four(!kAdvances, second, channel)}, kTypeOf<T>);
      if constexpr (kChannelDecay) {
        rows = decayed_rows(rows, t.path_decays(first).four(channel), t.path_decays(second).four(channel));
      }
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int half = part / 2, n = part % 2;
        const float b0 = state.x[step][half * 2][n], b1 = state.x[step][half * 2 + 1][n];
        if constexpr (kChannelDecay) {
          add_exact_product(high[n], low[n], rows.a[half], b0, b1, high_bits);
        } else {
          add_split_product(high[n], low[n], rows.a[half], b0, b1, high_bits);
        }
      }
    }
    const float norms[2] = {t.shared.norms[first], kAdvances ? t.shared.norms[second] : t.shared.query_norms[second]};
    const float decays[2] = {kChannelDecay ? 1.0f : decay_between(t.shared.sums[first], 0),
                             kChannelDecay ? 1.0f : decay_between(t.shared.sums[second], 0)};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int of = e / 4, n = e % 4;  // first or second token
      const float read =
          decayed(joined(high[n % 2][of * 2 + n / 2], low[n % 2][of * 2 + n / 2]), norms[of], decays[of]);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        if (tile != (kAdvances ? of : product)) continue;
        (kAdvances || of == 0 ? sums.left : sums.out)[tile].x[n] = read;
      }
    }
  }
}

template <int kCount>
struct alignas(4 * kCount) Weights {
  float x[kCount];
};

// Adds A u to `left` and C u to `out` for tokens m .. m + kCount - 1 on the `paths`.
template <bool kAdvances, int kCount>
__device__ __forceinline__ void add_weighed_u(const FewTokens& t, const float* u, const float* weights_of_quad,
                                              int32_t m, const uint64_t (&paths)[2], bool is_long, FewSums& sums) {
  Weights<kCount> weights[2][2];  // [tile, key or query]
#pragma unroll
  for (int at = 0; at < 4; ++at) {
    const int row = at % 2 * kTurn + at / 2 * kTile;
    weights[at / 2][at % 2] = *reinterpret_cast<const Weights<kCount>*>(weights_of_quad + row * kWeightStride + m);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float4 word = *reinterpret_cast<const float4*>(u + (m + j) * kFewColumns);
    const float of_m[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile == 1 && !is_long) break;
      if ((paths[tile] >> (m + j) & 1) == 0) continue;
      const float key = weights[tile][0].x[j], query = weights[tile][1].x[j];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (t.p.beta != nullptr) sums.left[tile].x[e] = __fmaf_rn(-key, of_m[e], sums.left[tile].x[e]);
        if (!kAdvances) sums.out[tile].x[e] = __fmaf_rn(query, of_m[e], sums.out[tile].x[e]);
      }
    }
  }
}

// Solves the turn's triangular system, per warp for its columns. Sums follow each path from the root.
template <bool kAdvances>
__device__ __forceinline__ void solve_turn(const FewTokens& t, int32_t begin, FewSums& sums) {
  const uint32_t thread = ptx::thread_index();
  const int32_t warp = static_cast<int32_t>(thread / 32), quad = static_cast<int32_t>(thread % 32 / 4);
  const bool is_long = t.count - begin > kTile;
  float* const u = t.u_of(warp, 0) + thread % 4 * 4;
  const float* const weights = t.weights_of(0, quad);
  uint64_t paths[2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int32_t i = begin + tile * kTile + quad;
    const auto& mask = t.shared.masks[i];
    paths[tile] = i < t.count ? uint64_t{mask[1]} << 32 | mask[0] : 0;
  }
#pragma unroll 1
  for (int32_t m = 0; m < begin; m += 4) add_weighed_u<kAdvances, 4>(t, u, weights, m, paths, is_long, sums);
#pragma unroll 1
  for (int32_t m = begin; m < min_of(t.count, begin + kTurn); ++m) {
    if (quad == m % kTile) {
      const float beta = t.shared.betas[m];
      float own[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) own[e] = (m - begin >= kTile ? sums.left[1].x[e] : sums.left[0].x[e]) * beta;
      *reinterpret_cast<float4*>(u + m * kFewColumns) = make_float4(own[0], own[1], own[2], own[3]);
    }
    __syncwarp();
    add_weighed_u<kAdvances, 1>(t, u, weights, m, paths, is_long, sums);
  }
}

// Stores four columns of a token; zeros if it is unreachable.
template <typename T>
__device__ __forceinline__ void store_output(const DeltaRuleParams& p, int64_t row, int32_t head, int32_t column,
                                             bool is_reachable, const Four& out) {
  const uint2 pairs = make_uint2(pack_pair<T>(out.x[0] * p.scale, out.x[1] * p.scale),
                                 pack_pair<T>(out.x[2] * p.scale, out.x[3] * p.scale));
  auto* const to = static_cast<uint16_t*>(p.out) + (row * p.num_heads + head) * p.value_dim + column;
  *reinterpret_cast<uint2*>(to) = is_reachable ? pairs : make_uint2(0, 0);
}

template <typename T>
__device__ __forceinline__ void store_outputs(const FewTokens& t, int32_t begin, const FewSums& sums) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int32_t i = begin + tile * kTile + static_cast<int32_t>(ptx::thread_index()) % 32 / 4;
    if (i >= t.count || t.column() >= t.p.value_dim) continue;
    store_output<T>(t.p, t.shared.rows[i], t.head, t.column(), t.shared.parents[i] >= -1, sums.out[tile]);
  }
}

// Stores S = D(last, 0) S0 + sum of D(last, m) k[m] u[m]^T.
template <typename T, StateWords kWords>
__device__ __forceinline__ void carry_few(const FewTokens& t, StateColumns<kWords>& state) {
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  const int64_t total = t.shared.sums[t.count - 1];
  for (int32_t i = quad; i < ceil_div(t.count, kTile) * kTile; i += kTile) {
    const float factor = t.shared.norms[i] * decay_between(total, t.shared.sums[i]);
    float* const u = t.u_of(warp, i) + pair * 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) u[e] = i < t.count ? u[e] * factor : 0.0f;
  }
  __syncwarp();
  const float decay = decay_between(total, 0);
#pragma unroll
  for (int step = 0; step < kFewSteps; ++step) {
    if (step * kStep >= t.p.key_dim) break;
    float added[2][4]{}, of_low[2][4]{};
#pragma unroll 1
    for (int32_t begin = 0; begin < t.count; begin += kTile) {
      const auto keys = [&](int32_t i) {
        return *reinterpret_cast<const uint32_t*>(t.row_of(0, begin + i) + step * kStep + quad * 2);
      };
      float high[4], low[4];  // tf32 parts of u; rows are columns of the state
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float u = t.u_of(warp, begin + pair + e / 2 * 4)[quad * 2 + e % 2];
        high[e] = high_part(u);
        low[e] = u - high[e];
      }
      add_keys<T>(added, of_low, high, low, keys(pair), keys(pair + 4));
    }
    add_to_state(state.x[step], added, of_low, decay);
    state.template copy<true>(t.p, step, state.x[step]);
  }
}

// The same with decays per channel, from the last token upward.
template <typename T, StateWords kWords>
__device__ __forceinline__ void carry_few_decayed(const FewTokens& t, StateColumns<kWords>& state) {
  const DeltaRuleParams& p = t.p;
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  __syncthreads();  // after all reads of P
  if (static_cast<int32_t>(threadIdx.x) < p.key_dim) {
#pragma unroll 4
    for (int32_t i = 0; i < t.count; ++i) {
      const float g = p.g[t.shared.rows[i] * p.g_token_stride + t.head * p.g_head_stride + threadIdx.x];
      t.decays[i * kRowStride + threadIdx.x] = decay_of<ScalarMath>(g);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step * kStep < p.key_dim; ++step) {  // rolled: the registers rotate, x[0] is the step's
    const int32_t channel = step * kStep + pair * 4;
    float decay[4] = {1.0f, 1.0f, 1.0f, 1.0f}, sums[4][2] = {};
#pragma unroll 1
    for (int32_t i = t.count - 1; i >= 0; --i) {
      const Four key = unpack(t.four(0, i, channel), kTypeOf<T>), decays = t.path_decays(i).four(channel);
      const float2 u = *reinterpret_cast<const float2*>(t.u_of(warp, i) + quad * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = decay[j] * (key.x[j] * t.shared.norms[i]);
        sums[j][0] = __fmaf_rn(weight, u.x, sums[j][0]);
        sums[j][1] = __fmaf_rn(weight, u.y, sums[j][1]);
        decay[j] *= decays.x[j];
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float& x = state.x[0][e / 2][e % 2];
      x = decay[e / 2] == 0.0f ? sums[e / 2][e % 2] : __fmaf_rn(decay[e / 2], x, sums[e / 2][e % 2]);
    }
    state.template copy<true>(p, step, state.x[0]);
#pragma unroll
    for (int e = 0; e < (kFewSteps - 1) * 8; ++e)
      state.x[e / 8][e / 2 % 4][e % 2] = state.x[e / 8 + 1][e / 2 % 4][e % 2];
  }
}

// One CTA per sequence, value head, and 64 columns.
template <typename T, StateWords kWords, bool kAdvances, bool kChannelDecay>
__global__ void __launch_bounds__(kFewWarps * 32, kChannelDecay ? 3 : 4)
    few_tokens_kernel(const __grid_constant__ DeltaRuleParams p, int32_t capacity, int32_t column_blocks) {
  const int32_t block = static_cast<int32_t>(blockIdx.x), item = block / column_blocks;
  const int32_t b = item / p.num_heads, head = item % p.num_heads;
  const int32_t first_column = block % column_blocks * kFewWarps * kFewColumns;
  StateColumns<kWords> state(p, b, head, first_column + static_cast<int32_t>(threadIdx.x) / 32 * kFewColumns);
  state.load(p);
  const Sequence sequence(p, b);
  if (!kAdvances) clear_others(p, sequence, head, first_column);
  const FewTokens t(p, sequence, capacity, head, first_column);
  if (t.count == 0) return;
  if constexpr (kChannelDecay) ptx::wait_for_kernels_before();
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if (thread < t.count) t.shared.rows[thread] = sequence.row(thread);
  __syncthreads();
  copy_tokens<kAdvances, kChannelDecay>(t);
  link(p, sequence, t.shared, t.shared.masks[0], kFewTokens / 32, head, t.count);
  ptx::cp_async_wait<0>();
  __syncthreads();
  find_norms<kAdvances>(t);
  __syncthreads();
#pragma unroll 1
  for (int32_t begin = 0; begin < t.count; begin += kTurn) {
    FewSums sums;
    if (!kAdvances || p.beta != nullptr) {
      compute_turn<T, kAdvances, kChannelDecay>(t, begin);
      if constexpr (kChannelDecay) {
        __syncthreads();
        compute_by_paths(t, begin, t.count);
      }
      read_state<T, kAdvances, kChannelDecay>(t, state, begin, sums);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const auto* const pairs =
          reinterpret_cast<const uint2*>(t.u_of(thread / 32, begin + tile * kTile + thread % 32 / 4));
      const Four value = unpack(pairs[thread % 4], kTypeOf<T>);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.left[tile].x[e] = left_of(p, value.x[e], sums.left[tile].x[e]);
    }
    __syncthreads();
    solve_turn<kAdvances>(t, begin, sums);
    if constexpr (!kAdvances) store_outputs<T>(t, begin, sums);
    __syncthreads();  // after all reads of A and C
  }
  if constexpr (kAdvances && kChannelDecay) carry_few_decayed<T>(t, state);
  if constexpr (kAdvances && !kChannelDecay) carry_few<T>(t, state);
}

}  // namespace pagedtree::cuda
