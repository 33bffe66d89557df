// Tokens whose decays per channel leave the range of products: a warp multiplies key and query up the token's path.
#pragma once

#include "cuda/recurrent/chunk.cuh"

namespace pagedtree::cuda {

// Computes A[i, m] and C[i, m] for the path of token i, by one warp. A lane has 4 channels of each 128.
template <int kParts, typename Tokens>
__device__ __forceinline__ void walk(const DeltaRuleParams& p, int32_t head, const Tokens& tokens, int32_t i,
                                     float query_norm, float* key_weights, float* query_weights) {
  const int32_t lane = threadIdx.x % 32, key_head = head / p.group_size;
  const auto load_key = [&](int32_t token, int32_t c) {
    Four key = load_four_halves(p.k, p.dtype, tokens.rows[token] * p.k_token_stride + key_head * p.k_head_stride + c);
#pragma unroll
    for (float& x : key.x) x *= tokens.norms[token];
    return key;
  };
  Four key[kParts]{}, query[kParts]{};
  float own = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int32_t c = part * 128 + lane * 4;
    if (c < p.key_dim) key[part] = load_key(i, c);
    if (c < p.key_dim && p.out != nullptr) {
      query[part] = load_four_halves(p.q, p.dtype, tokens.rows[i] * p.q_token_stride + key_head * p.q_head_stride + c);
    }
    own = dot(key[part], query[part], own);
  }
  own = warp_sum(own) * query_norm;
  if (lane == 0) query_weights[i] = own;
  for (int32_t token = i;;) {
    const int32_t above = tokens.parents[token];
    if (above < 0) break;
    const float* const g = p.g + tokens.rows[token] * p.g_token_stride + head * p.g_head_stride;
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
      const Four other = load_key(above, c);
      key_sum = dot(key[part], other, key_sum);
      query_sum = dot(query[part], other, query_sum);
    }
    key_sum = warp_sum(key_sum);
    query_sum = warp_sum(query_sum) * query_norm;
    if (lane == 0) {
      key_weights[above] = key_sum;
      query_weights[above] = query_sum;
    }
    token = above;
  }
}

template <typename Tokens>
__device__ __forceinline__ void compute_by_paths(const Tokens& t, int32_t begin, int32_t count) {
  for (int32_t row = threadIdx.x / 32; row < t.group && begin + row < count; row += blockDim.x / 32) {
    const int32_t i = begin + row;
    if (t.shared.parents[i] < -1 || !t.path_decays(i).walks()) continue;
    walk<Tokens::kParts>(t.p, t.head, t.shared, i, t.query_norm(begin, row), t.weights_of(0, row),
                         t.weights_of(1, row));
  }
  __syncthreads();
}

// Updates the state behind a chain; warps have separate channels.
__device__ __forceinline__ void carry_by_paths(const Chunk& t, int32_t count) {
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
