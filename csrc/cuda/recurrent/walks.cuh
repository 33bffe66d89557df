// Tokens whose decays of channels leave the range of products: a warp walks the path of one such token upwards, and
// multiplies its key and its query by the decays as it goes. And the state behind a chain.
#pragma once

#include "cuda/recurrent/chunk.cuh"

namespace pagedtree::cuda {

constexpr int kParts = kMaxRecurrentDim / 128;  // a lane has channels 4 lane .. 4 lane + 3 of each 128

// By one warp: the weights for token i of the tokens on its path, itself included. A path has row(i), the norm of a
// key key_norm(i), above(i), below 0 at the root, and put(m, of the key, of the query).
template <typename Path>
__device__ __forceinline__ void walk(const DeltaRuleParams& p, int32_t head, const Path& path, int32_t i,
                                     float query_norm) {
  const int32_t lane = threadIdx.x % 32, key_head = head / p.group_size;
  const auto load_key = [&](int32_t token, int32_t c) {
    Four key = load_four_halves(p.k, p.dtype, path.row(token) * p.k_token_stride + key_head * p.k_head_stride + c);
#pragma unroll
    for (float& x : key.x) x *= path.key_norm(token);
    return key;
  };
  Four key[kParts]{}, query[kParts]{};
  float own = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int32_t c = part * 128 + lane * 4;
    if (c < p.key_dim) key[part] = load_key(i, c);
    if (c < p.key_dim && p.out != nullptr) {
      query[part] = load_four_halves(p.q, p.dtype, path.row(i) * p.q_token_stride + key_head * p.q_head_stride + c);
    }
    own = dot(key[part], query[part], own);
  }
  own = warp_sum(own) * query_norm;
  if (lane == 0) path.put(i, 0.0f, own);
  for (int32_t token = i;;) {
    const int32_t above = path.above(token);
    if (above < 0) break;
    const float* const g = p.g + path.row(token) * p.g_token_stride + head * p.g_head_stride;
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
    if (lane == 0) path.put(above, key_sum, query_sum);
    token = above;
  }
}

// The weights of one row of a chunk's group.
struct ChunkPath {
  const Chunk& t;
  int32_t of_group;

  __device__ int64_t row(int32_t i) const { return t.shared.rows[i]; }
  __device__ float key_norm(int32_t i) const { return t.shared.norms[i]; }
  __device__ int32_t above(int32_t i) const { return t.shared.parents[i]; }
  __device__ void put(int32_t m, float key, float query) const {
    t.weights_of(0, of_group)[m] = key;
    t.weights_of(1, of_group)[m] = query;
  }
};

// The tokens from `begin` on that walk.
__device__ __forceinline__ void weigh_by_walks(const Chunk& t, int32_t begin, int32_t count) {
  for (int32_t row = threadIdx.x / 32; row < t.group && begin + row < count; row += kWarps) {
    const int32_t i = begin + row;
    if (t.shared.parents[i] < -1 || !path_decays_of(t.p, t.shared.rows[i], t.head).walks()) continue;
    walk(t.p, t.head, ChunkPath{t, row}, i, t.p.out != nullptr ? t.shared.query_norms[row] : 1.0f);
  }
  __syncthreads();
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
