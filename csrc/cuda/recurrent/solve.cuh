// Solves a group's triangular system in blocks of 8 tokens. Each warp sums a token's earlier blocks, one warp
// substitutes within the block, each warp completes its token's output. Sums follow each path from the root.
#pragma once

#include "cuda/recurrent/chunk.cuh"

namespace pagedtree::cuda {

// Forward substitution by one warp, a column per lane: u of tokens begin .. begin + 7. reads hold v minus prediction.
__device__ __forceinline__ void substitute(const Chunk& t, int32_t begin, int32_t row, int32_t count) {
  const int32_t lane = threadIdx.x % 32;
  const bool with_beta = t.p.beta != nullptr;
  float left[kBlock], weights[kBlock][kBlock];
  uint32_t above[kBlock];
#pragma unroll
  for (int s = 0; s < kBlock; ++s) {
    left[s] = t.reads_of(0, row + s)[lane];
    above[s] = begin + s < count ? t.ancestors(begin + s, begin / kBlock) : 0;
#pragma unroll
    for (int m = 0; m < s; ++m) weights[s][m] = t.weights_of(0, row + s)[begin + m];
  }
  __syncwarp();  // all loads precede the dependent chain
#pragma unroll
  for (int m = 0; m < kBlock; ++m) {
    if (begin + m >= count) break;
    const float u = left[m] * t.shared.betas[begin + m];
    t.u[(begin + m) * kColumns + lane] = u;
#pragma unroll
    for (int s = m + 1; s < kBlock; ++s) {
      if (with_beta && (above[s] >> m & 1)) left[s] = __fmaf_rn(-weights[s][m], u, left[s]);
    }
  }
}

__device__ __forceinline__ float load_value(const Chunk& t, int32_t i, int32_t count) {
  const DeltaRuleParams& p = t.p;
  if (i >= count || t.shared.parents[i] < -1 || t.column >= p.value_dim) return 0.0f;
  return load_half(p.v, p.dtype, t.shared.rows[i] * p.v_token_stride + t.head * p.v_head_stride + t.column);
}

__device__ __forceinline__ void solve(const Chunk& t, int32_t first, int32_t count) {
  const DeltaRuleParams& p = t.p;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t end = min_of(count, first + t.group);
  float value = load_value(t, first + warp, count);
  for (int32_t begin = first; begin < end; begin += kBlock) {
    const int32_t i = begin + warp, row = i - first;
    const bool is_reachable = i < count && t.shared.parents[i] >= -1;
    const float* const key_weights = t.weights_of(0, row);
    const float* const query_weights = t.weights_of(1, row);
    float left = left_of(p, value, t.reads_of(0, row)[lane]), query_sum = t.reads_of(1, row)[lane];
    for (int32_t m = 0; is_reachable && m < begin; m += kBlock) {
      const uint32_t above = t.ancestors(i, m / kBlock);
      if (above == 0) continue;
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        const float u = t.u[(m + j) * kColumns + lane], a = key_weights[m + j], c = query_weights[m + j];
        if (above >> j & 1) {
          if (p.beta != nullptr) left = __fmaf_rn(-a, u, left);
          query_sum = __fmaf_rn(c, u, query_sum);
        }
      }
    }
    t.reads_of(0, row)[lane] = left;
    value = load_value(t, i + kBlock, count);  // prefetch for the next block
    __syncthreads();
    if (warp == 0) substitute(t, begin, begin - first, count);
    __syncthreads();
    if (p.out == nullptr || !is_reachable || t.column >= p.value_dim) continue;
    const uint32_t above = t.ancestors(i, begin / kBlock);
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      const float u = t.u[(begin + j) * kColumns + lane], c = query_weights[begin + j];
      if (above >> j & 1) query_sum = __fmaf_rn(c, u, query_sum);
    }
    const int64_t at = (t.shared.rows[i] * int64_t{p.num_heads} + t.head) * p.value_dim + t.column;
    store_element(p.out, p.dtype, at, query_sum * p.scale);
  }
  __syncthreads();
}

}  // namespace pagedtree::cuda
