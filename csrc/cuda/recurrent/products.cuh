// Weights of tokens with one decay for each head, by tensor cores. Such a decay is a factor of whole products: a tile
// of 16 rows, 8 keys and the queries of the same tokens, is multiplied with the state and with the keys of other
// tokens. fp16 and bf16 are exact in tf32, an element of the state is the sum of two numbers of tf32.
#pragma once

#include "cuda/recurrent/chunk.cuh"

namespace pagedtree::cuda {

// A lane has 4 of each 16 channels. Beyond the last channel it reads the last ones again, where the rows are 0.
constexpr int kPassChannels = 64, kSteps = kPassChannels / 16;
constexpr int kReadTiles = kColumns / 8;

__device__ __forceinline__ int32_t first_channel(const Chunk& t, int32_t first, int step) {
  return min_of(first + step * 16 + static_cast<int32_t>(threadIdx.x % 4) * 4, t.p.key_dim - 4);
}

// A lane's channels of a row. All loads start before the first one ends.
__device__ __forceinline__ void load_row(const Chunk& t, const void* data, int64_t at, int32_t first,
                                         uint2 (&pairs)[kSteps]) {
  const uint16_t* const row = static_cast<const uint16_t*>(data) + at;
  const bool aligned = is_aligned(row);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    pairs[step] = load_pairs(row + first_channel(t, first, step), aligned);
  }
}

// Channels of key and query `quad`, for two products in each step.
struct RowTile {
  float a[kSteps][2][4];
};

// The part of x that tf32 holds.
__device__ __forceinline__ float high_part(float x) {
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) & 0xffffe000u);
}

__device__ __forceinline__ void add_split_product(float (&high)[4], float (&low)[4], const float (&a)[4], float b0,
                                                  float b1) {
  const float b0_high = high_part(b0), b1_high = high_part(b1);
  ptx::mma_m16n8k8(high, a, b0_high, b1_high);
  ptx::mma_m16n8k8(low, a, b0 - b0_high, b1 - b1_high);
}

// The sum of both products. Where an element is infinite its low part is NaN, and the high part is the result.
__device__ __forceinline__ float joined(float high, float low) { return low != low ? high : high + low; }

// Adds to the sums of squares of key and query.
__device__ __forceinline__ RowTile load_rows(const Chunk& t, int32_t i, int32_t count, int32_t first,
                                             float& key_squares, float& query_squares) {
  const DeltaRuleParams& p = t.p;
  const int32_t token = min_of(i, count - 1);
  uint2 key_pairs[kSteps] = {}, query_pairs[kSteps] = {};
  load_row(t, p.k, key_row(t, token), first, key_pairs);
  if (p.out != nullptr) load_row(t, p.q, query_row(t, token), first, query_pairs);
  RowTile rows;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const bool inside = i < count && first + step * 16 + static_cast<int32_t>(threadIdx.x % 4) * 4 < p.key_dim;
    const Four k = unpack(key_pairs[step], p.dtype), q = unpack(query_pairs[step], p.dtype);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float key = inside ? k.x[j] : 0.0f, query = inside ? q.x[j] : 0.0f;
      rows.a[step][j / 2][j % 2 * 2] = key;
      rows.a[step][j / 2][j % 2 * 2 + 1] = query;
      key_squares = __fmaf_rn(key, key, key_squares);
      query_squares = __fmaf_rn(query, query, query_squares);
    }
  }
  return rows;
}

// Their products with 8 columns of the state.
__device__ __forceinline__ void multiply_state(const Chunk& t, const RowTile& rows, int32_t first, int32_t tile,
                                               float (&sum)[4]) {
  const int32_t lane = threadIdx.x % 32, column = tile * 8 + lane / 4;
  float low[4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float* b = t.state + first_channel(t, first, step) * kStateStride + column;
    add_split_product(sum, low, rows.a[step][0], b[0], b[kStateStride]);
    add_split_product(sum, low, rows.a[step][1], b[2 * kStateStride], b[3 * kStateStride]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) sum[j] = joined(sum[j], low[j]);
}

// Their products with the keys of tokens 8 * block .. 8 * block + 7.
__device__ __forceinline__ void multiply_keys(const Chunk& t, const RowTile& rows, int32_t first, int32_t block,
                                              int32_t count, float (&sum)[4]) {
  const int32_t m = min_of<int32_t>(block * kBlock + threadIdx.x % 32 / 4, count - 1);
  uint2 pairs[kSteps];
  load_row(t, t.p.k, key_row(t, m), first, pairs);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const Four b = unpack(pairs[step], t.p.dtype);
    ptx::mma_m16n8k8(sum, rows.a[step][0], b.x[0], b.x[1]);
    ptx::mma_m16n8k8(sum, rows.a[step][1], b.x[2], b.x[3]);
  }
}

// Weights and reads of the tokens begin .. begin + group - 1. A warp has 8 of them, and some of their products.
__device__ __forceinline__ void weigh_by_products(const Chunk& t, int32_t begin, int32_t count) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, pair = lane % 4;
  const int32_t shift = __ffs(t.group / kBlock) - 1;  // a power of 2
  const int32_t blocks = 1 << shift, block = warp & (blocks - 1), parts = kWarps >> shift;
  const int32_t row = block * kBlock + quad, i = begin + row;
  const int32_t own = begin / kBlock + block;  // among all blocks
  float key_norm = 0.0f, query_norm = 0.0f;    // sums of squares before the last pass
  for (int32_t first = 0; first < t.p.key_dim; first += kPassChannels) {
    const RowTile rows = load_rows(t, i, count, first, key_norm, query_norm);
    const bool is_last = first + kPassChannels >= t.p.key_dim;
    if (is_last) {
      for (int bits = 1; bits < 4; bits *= 2) {
        key_norm += __shfl_xor_sync(~0u, key_norm, bits);
        query_norm += __shfl_xor_sync(~0u, query_norm, bits);
      }
      key_norm = norm_of(t.p, key_norm);
      query_norm = norm_of(t.p, query_norm);
      if (i < count && pair == 0 && warp < blocks) t.shared.norms[i] = key_norm;
      __syncthreads();
    }
    if (own * kBlock >= count) continue;
    for (int32_t job = warp >> shift; job <= kReadTiles + own; job += parts) {
      const int32_t other = job - kReadTiles, m = other * kBlock + pair * 2;
      const bool reads = other < 0;
      if (!reads && !__any_sync(~0u, i < count && t.ancestors(i, other) != 0)) continue;
      float sum[4] = {};
      if (reads) {
        multiply_state(t, rows, first, job, sum);
      } else {
        multiply_keys(t, rows, first, other, count, sum);
      }
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        float* const to = reads ? t.reads_of(which, row) + job * 8 + pair * 2 : t.weights_of(which, row) + m;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float x = sum[which * 2 + j];
          if (first > 0) x += to[j];
          if (is_last && i < count) {
            const bool is_other = !reads && m + j < count;
            const float decay = decay_between(t.shared.sums[i], is_other ? t.shared.sums[m + j] : 0);
            x *= (which == 0 ? key_norm : query_norm) * (is_other ? t.shared.norms[m + j] : 1.0f);
            x = decay == 0.0f ? 0.0f : x * decay;
          }
          to[j] = x;
        }
      }
    }
  }
  __syncthreads();
}

// The state behind the last token of a chain.
__device__ __forceinline__ void carry_by_products(const Chunk& t, int32_t count) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, pair = lane % 4;
  const int64_t total = t.shared.sums[count - 1];
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
