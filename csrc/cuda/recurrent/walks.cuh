// Weights of tokens with a decay for each key channel: a warp walks the path of one token upwards, and multiplies its
// key and its query by the decays as it goes.
#pragma once

#include "cuda/recurrent/chunk.cuh"

namespace pagedtree::cuda {

constexpr int kParts = kMaxRecurrentDim / 128;  // a lane has channels 4 lane .. 4 lane + 3 of each 128

// Channels c .. c + 3 of the key of token i, normalised.
__device__ __forceinline__ Four load_key(const Chunk& t, int32_t i, int32_t c) {
  Four key = load_four_halves(t.p.k, t.p.dtype, key_row(t, i) + c);
#pragma unroll
  for (float& x : key.x) x *= t.shared.norms[i];
  return key;
}

// By one warp: token i, row `row` of its group.
__device__ __forceinline__ void walk(const Chunk& t, int32_t i, int32_t row) {
  const DeltaRuleParams& p = t.p;
  const int32_t lane = threadIdx.x % 32;
  Four key[kParts]{}, query[kParts]{};
  float own = 0.0f, squares = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int32_t c = part * 128 + lane * 4;
    if (c < p.key_dim) key[part] = load_key(t, i, c);
    if (c < p.key_dim && p.out != nullptr) query[part] = load_four_halves(p.q, p.dtype, query_row(t, i) + c);
    squares = dot(query[part], query[part], squares);
    own = dot(key[part], query[part], own);
  }
  const float norm = norm_of(p, warp_sum(squares));
  own = warp_sum(own) * norm;
  float *const key_weights = t.weights_of(0, row), *const query_weights = t.weights_of(1, row);
  if (lane == 0) query_weights[i] = own;
  for (int32_t above = i;;) {
    const int32_t next = t.shared.parents[above];
    const float* const g = p.g + decay_row(t, above);
    float key_sum = 0.0f, query_sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int32_t c = part * 128 + lane * 4;
      if (c >= p.key_dim) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float decay = decay_of<ScalarMath>(g[c + j]);
        key[part].x[j] *= decay;
        query[part].x[j] *= decay;
      }
      if (next < 0) continue;
      const Four other = load_key(t, next, c);
      key_sum = dot(key[part], other, key_sum);
      query_sum = dot(query[part], other, query_sum);
    }
    if (next < 0) break;
    key_sum = warp_sum(key_sum);
    query_sum = warp_sum(query_sum) * norm;
    if (lane == 0) {
      key_weights[next] = key_sum;
      query_weights[next] = query_sum;
    }
    above = next;
  }
  if (p.key_dim <= kPassChannels) {
    float* const to = t.decayed + row % kBlock * kDecayedStride + lane * 4;
    const Four &k = key[0], &q = query[0];
    *reinterpret_cast<float4*>(to) = make_float4(k.x[0], k.x[1], k.x[2], k.x[3]);
    *reinterpret_cast<float4*>(to + kBlock * kDecayedStride) =
        make_float4(q.x[0] * norm, q.x[1] * norm, q.x[2] * norm, q.x[3] * norm);
    return;
  }
  float read_key = 0.0f, read_query = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll 1
    for (int32_t c = part * 128; c < min_of(p.key_dim, part * 128 + 128); c += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = t.state[(c + j) * kStateStride + lane];
        read_key = __fmaf_rn(__shfl_sync(~0u, key[part].x[j], c % 128 / 4), value, read_key);
        read_query = __fmaf_rn(__shfl_sync(~0u, query[part].x[j], c % 128 / 4), value, read_query);
      }
    }
  }
  t.reads_of(0, row)[lane] = read_key;
  t.reads_of(1, row)[lane] = read_query * norm;
}

// What 8 tokens from row `first` of the group on read of the state: products of tf32, of which rows and state are the
// sums of two numbers each. By four warps, with 8 columns each.
__device__ __forceinline__ void read_decayed(const Chunk& t, int32_t first) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, pair = lane % 4;
  if (warp >= kColumns / 8) return;
  float high[4] = {}, low[4] = {};
  for (int32_t step = 0; step * kStep < t.p.key_dim; ++step) {
    const float* const from = t.decayed + quad * kDecayedStride + step * kStep + pair * 4;
    const float4 k = *reinterpret_cast<const float4*>(from);
    const float4 q = *reinterpret_cast<const float4*>(from + kBlock * kDecayedStride);
    const float* const b = t.state + (step * kStep + pair * 4) * kStateStride + warp * 8 + quad;
    const float rows[2][4] = {{k.x, q.x, k.y, q.y}, {k.z, q.z, k.w, q.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float rest[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) rest[j] = rows[half][j] - high_part(rows[half][j]);
      const float b0 = b[half * 2 * kStateStride], b1 = b[(half * 2 + 1) * kStateStride];
      add_split_product(high, low, rows[half], b0, b1);
      ptx::mma_m16n8k8(low, rest, high_part(b0), high_part(b1));
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) t.reads_of(j / 2, first + quad)[warp * 8 + pair * 2 + j % 2] = joined(high[j], low[j]);
}

__device__ __forceinline__ void weigh_by_walks(const Chunk& t, int32_t begin, int32_t count) {
  for (int32_t first = 0; first < t.group && begin + first < count; first += kWarps) {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x) / 32;
    if (begin + row < count && t.shared.parents[begin + row] >= -1) walk(t, begin + row, row);
    __syncthreads();
    if (t.p.key_dim > kPassChannels) continue;
    read_decayed(t, first);
    __syncthreads();
  }
}

// The state behind the last token of a chain; each warp has channels of its own.
__device__ __forceinline__ void carry_by_walks(const Chunk& t, int32_t count) {
  const int32_t lane = threadIdx.x % 32;
  for (int32_t c = threadIdx.x / 32; c < t.p.key_dim; c += kWarps) {
    float decay = 1.0f, sum = 0.0f;
    for (int32_t i = count - 1; i >= 0; --i) {
      const float key = load_half(t.p.k, t.p.dtype, key_row(t, i) + c) * t.shared.norms[i];
      sum = __fmaf_rn(decay * key, t.u[i * kColumns + lane], sum);
      decay *= decay_of<ScalarMath>(t.p.g[decay_row(t, i) + c]);
    }
    float& state = t.state[c * kStateStride + lane];
    state = decay == 0.0f ? sum : __fmaf_rn(decay, state, sum);
  }
}

}  // namespace pagedtree::cuda
