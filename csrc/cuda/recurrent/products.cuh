// A, C, and reads of the state by tensor cores. A tile's 16 rows are 8 keys and their queries; the other operand is the
// state or keys. Decays per head scale products, decays per channel rows and keys (path_decays.cuh).
#pragma once

#include "cuda/recurrent/chunk.cuh"

namespace pagedtree::cuda {

constexpr int kSteps = kPassChannels / kStep;
constexpr int kReadTiles = kColumns / 8;
template <bool kChannelDecay>
constexpr int kStepsAtOnce = kChannelDecay ? kSteps / 2 : kSteps;

__device__ __forceinline__ int32_t lane_channel(int32_t first, int step) {
  return first + step * kStep + static_cast<int32_t>(threadIdx.x % 4) * 4;
}

// Loads four channels of a row, 0 past the end.
__device__ __forceinline__ uint2 load_four(const Chunk& t, const void* data, int64_t row, int32_t channel) {
  const uint16_t* const from = static_cast<const uint16_t*>(data) + row;
  return channel < t.p.key_dim ? load_pairs(from + channel, is_aligned(from)) : make_uint2(0, 0);
}

// Loads a lane's channels of a row; all loads overlap.
__device__ __forceinline__ void load_row(const Chunk& t, const void* data, int64_t row, int32_t first,
                                         uint2 (&pairs)[kSteps]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) pairs[step] = load_four(t, data, row, lane_channel(first, step));
}

// Key and query `quad`. Decays per channel load them at use: unpacked rows would stay in registers across products.
struct RowTile {
  int32_t token;
  uint2 keys[kSteps], queries[kSteps];

  template <bool kChannelDecay>
  __device__ __forceinline__ TokenPairs pairs(const Chunk& t, int32_t first, int step) const {
    if (!kChannelDecay) return {keys[step], queries[step]};
    const int32_t channel = lane_channel(first, step);
    return {load_four(t, t.p.k, key_row(t, token), channel),
            t.p.out == nullptr ? make_uint2(0, 0) : load_four(t, t.p.q, query_row(t, token), channel)};
  }
};

template <bool kChannelDecay>
__device__ __forceinline__ RowTile load_rows(const Chunk& t, int32_t i, int32_t count, int32_t first) {
  RowTile rows{};
  rows.token = min_of(i, count - 1);
  if (kChannelDecay) return rows;
  load_row(t, t.p.k, key_row(t, rows.token), first, rows.keys);
  if (t.p.out != nullptr) load_row(t, t.p.q, query_row(t, rows.token), first, rows.queries);
  return rows;
}

template <bool kChannelDecay>
__device__ __forceinline__ void multiply_state(const Chunk& t, const RowTile& rows, int32_t first, int32_t tile,
                                               float (&sum)[4]) {
  const int32_t lane = threadIdx.x % 32, column = tile * 8 + lane / 4;
  float low[4] = {};
#pragma unroll kStepsAtOnce < kChannelDecay>
  for (int step = 0; step < kSteps; ++step) {
    const int32_t channel = lane_channel(first, step);
    if (first + step * kStep >= t.p.key_dim) break;
    StepRows a = rows_of(rows.pairs<kChannelDecay>(t, first, step), t.p.dtype);
    const float* b = t.state + channel * kStateStride + column;
    if constexpr (kChannelDecay) {
      const Four decays = t.path_decays(rows.token).four(channel);
      a = decayed_rows(a, decays, decays);
      add_exact_product(sum, low, a.a[0], b[0], b[kStateStride]);
      add_exact_product(sum, low, a.a[1], b[2 * kStateStride], b[3 * kStateStride]);
    } else {
      add_split_product(sum, low, a.a[0], b[0], b[kStateStride]);
      add_split_product(sum, low, a.a[1], b[2 * kStateStride], b[3 * kStateStride]);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) sum[j] = joined(sum[j], low[j]);
}

template <bool kChannelDecay>
__device__ __forceinline__ void multiply_keys(const Chunk& t, const RowTile& rows, int32_t first, int32_t block,
                                              int32_t count, float (&sum)[4]) {
  const int32_t m = min_of<int32_t>(block * kBlock + threadIdx.x % 32 / 4, count - 1);
  uint2 keys[kSteps];
  if constexpr (!kChannelDecay) load_row(t, t.p.k, key_row(t, m), first, keys);
  float low[4] = {};
#pragma unroll kStepsAtOnce < kChannelDecay>
  for (int step = 0; step < kSteps; ++step) {
    const int32_t channel = lane_channel(first, step);
    if (first + step * kStep >= t.p.key_dim) break;
    const TokenPairs own = rows.pairs<kChannelDecay>(t, first, step);
    if constexpr (kChannelDecay) {
      const Four decays = t.path_decays(rows.token).four(channel);
      const StepRows a = decayed_rows(rows_of(own, t.p.dtype), decays, decays);
      const Four key =
          undecayed(unpack(load_four(t, t.p.k, key_row(t, m), channel), t.p.dtype), t.path_decays(m).four(channel));
      add_exact_product(sum, low, a.a[0], key.x[0], key.x[1]);
      add_exact_product(sum, low, a.a[1], key.x[2], key.x[3]);
    } else if (t.p.dtype == DType::kFloat16) {
      add_key_product<__half>(sum, own, keys[step]);
    } else {
      add_key_product<__nv_bfloat16>(sum, own, keys[step]);
    }
  }
  if constexpr (kChannelDecay) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] = joined(sum[j], low[j]);
  }
}

// Computes A, C, and reads of a group. Warps of a block of tokens share its products.
template <bool kChannelDecay>
__device__ __forceinline__ void compute_by_products(const Chunk& t, int32_t begin, int32_t count) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, pair = lane % 4;
  const int32_t shift = __ffs(t.group / kBlock) - 1;  // log2 of the group's blocks
  const int32_t blocks = 1 << shift, block = warp & (blocks - 1), parts = kWarps >> shift;
  const int32_t row = block * kBlock + quad, i = begin + row;
  const int32_t own = begin / kBlock + block;  // index among all blocks
  find_norms(t, begin, count);
  for (int32_t first = 0; first < t.p.key_dim && own * kBlock < count; first += kPassChannels) {
    const RowTile rows = load_rows<kChannelDecay>(t, i, count, first);
    const bool is_last = first + kPassChannels >= t.p.key_dim;
    for (int32_t job = warp >> shift; job <= kReadTiles + own; job += parts) {
      const int32_t other = job - kReadTiles, m = other * kBlock + pair * 2;
      const bool reads = other < 0;
      if (!reads && !__any_sync(~0u, i < count && t.ancestors(i, other) != 0)) continue;
      float sum[4] = {};
      if (reads) {
        multiply_state<kChannelDecay>(t, rows, first, job, sum);
      } else {
        multiply_keys<kChannelDecay>(t, rows, first, other, count, sum);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float norm = 1.0f, decay = 1.0f;
        if (is_last && i < count) {
          const bool is_other = !reads && m + j < count;
          if (is_other) norm = t.shared.norms[m + j];
          if (!kChannelDecay) decay = decay_between(t.shared.sums[i], is_other ? t.shared.sums[m + j] : 0);
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          float& to = (reads ? t.reads_of(which, row) + job * 8 + pair * 2 : t.weights_of(which, row) + m)[j];
          const float x = first > 0 ? sum[which * 2 + j] + to : sum[which * 2 + j];
          const float own_norm = which == 0 ? t.shared.norms[i] : t.query_norms[row];
          to = is_last && i < count ? decayed(x, own_norm * norm, decay) : x;
        }
      }
    }
  }
  __syncthreads();
}

// Updates the state: S = D(last, 0) S0 + sum of D(last, m) k[m] u[m]^T.
__device__ __forceinline__ void carry_by_products(const Chunk& t, int32_t count) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, pair = lane % 4;
  const int64_t total = t.shared.sums[count - 1];
#pragma unroll 1
  for (int32_t i = warp; i < count; i += kWarps) {
    t.u[i * kColumns + lane] *= t.shared.norms[i] * decay_between(total, t.shared.sums[i]);
  }
  __syncthreads();
  const float decay = decay_between(total, 0);
  for (int32_t first = warp * 16; first < t.p.key_dim; first += kWarps * 16) {
    float sums[kReadTiles][4] = {}, low[kReadTiles][4] = {};
    for (int32_t begin = 0; begin < count; begin += kBlock) {
      float a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t channel = first + quad + j % 2 * 8, i = begin + pair + j / 2 * 4;
        const bool inside = channel < t.p.key_dim && i < count;
        a[j] = inside ? load_half(t.p.k, t.p.dtype, key_row(t, i) + channel) : 0.0f;
      }
      const int32_t i = begin + pair;
#pragma unroll
      for (int tile = 0; tile < kReadTiles; ++tile) {
        const float* u = t.u + i * kColumns + tile * 8 + quad;
        add_split_product(sums[tile], low[tile], a, i < count ? u[0] : 0.0f, i + 4 < count ? u[4 * kColumns] : 0.0f);
      }
    }
#pragma unroll
    for (int j = 0; j < kReadTiles * 4; ++j) {
      const int32_t channel = first + quad + j % 4 / 2 * 8;
      if (channel >= t.p.key_dim) continue;
      float& state = t.state[channel * kStateStride + j / 4 * 8 + pair * 2 + j % 2];
      const float sum = joined(sums[j / 4][j % 4], low[j / 4][j % 4]);
      state = decay == 0.0f ? sum : __fmaf_rn(decay, state, sum);
    }
  }
}

}  // namespace pagedtree::cuda
