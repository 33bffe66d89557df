// The tokens of a sequence and their paths.
#pragma once

#include "cuda/recurrent/numbers.cuh"

namespace pagedtree::cuda {

// tokens_to_replay() by a warp: lanes check different nodes, so that no load depends on another or the path's length.
__device__ __forceinline__ int32_t replayed_tokens(const RecurrentBatch& p, int64_t b) {
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  if (p.accept_index == nullptr) return state_index_of(p, b) < 0 ? 0 : static_cast<int32_t>(rows.size());
  const int32_t* const path = p.accept_index + b * p.accept_stride;
  const int32_t accepted = p.num_accepted[b];
  bool is_path = true;
  int32_t first = 0;
  do {
    const int32_t j = first + static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t node = j < p.path_width ? path[j] : -1, above = j > 0 && j < p.path_width ? path[j - 1] : -1;
    const bool is_node = node >= 0 && node < rows.size();
    const bool follows = is_node && linked_parent(p, rows.begin, node) == above;
    is_path = !__any_sync(~0u, j <= accepted && !follows);
    first += 32;
  } while (is_path && first <= accepted);
  is_path = is_path && accepted >= 0 && accepted < p.path_width && state_index_of(p, b) >= 0;
  return is_path ? accepted + 1 : 0;
}

// The tokens in processing order: a whole tree, or chunks of a chain.
struct Sequence {
  const RecurrentBatch& tokens;
  int32_t b, begin, end;  // rows
  int32_t total;
  bool is_tree;

  __device__ Sequence(const DeltaRuleParams& p, int32_t of_batch) : tokens(p.tokens), b(of_batch) {
    const bool writes = p.out == nullptr;
    const NodeRange rows = node_range(tokens.cu_nodes, tokens.batch, b, tokens.num_rows);
    begin = static_cast<int32_t>(rows.begin);
    end = static_cast<int32_t>(rows.end);
    is_tree = !writes && tokens.parents != nullptr;
    total = writes ? replayed_tokens(tokens, b) : end - begin;
    if (is_tree) total = min_of(total, tokens.max_nodes);
  }
  __device__ int32_t row(int32_t i) const {
    return begin + (tokens.accept_index != nullptr ? tokens.accept_index[b * tokens.accept_stride + i] : i);
  }
  __device__ int16_t parent(int32_t i) const {
    return static_cast<int16_t>(is_tree ? linked_parent(tokens, begin, i) : i - 1);
  }
};

template <int kMost>
struct LinkedTokens {
  int64_t sums[kMost];  // fixed-point sums of g along the path
  int32_t rows[kMost];
  float betas[kMost];      // default 1
  float norms[kMost];      // factors of the keys
  int16_t parents[kMost];  // -1: none, -2: unreachable
  int16_t jumps[kMost];    // scratch of link()
};

// Computes path masks and sums of g by pointer jumping, one thread per token. Each round doubles the reach.
template <int kMost>
__device__ __forceinline__ void link(const DeltaRuleParams& p, const Sequence& sequence, LinkedTokens<kMost>& tokens,
                                     uint32_t* masks, int32_t words, int32_t head, int32_t count) {
  constexpr int kWords = kMost / 32;
  const int32_t i = threadIdx.x;
  const bool is_token = i < count;
  const int64_t row = is_token ? tokens.rows[i] : 0;
  const int16_t parent = is_token ? sequence.parent(i) : int16_t{-2};
  int32_t above = parent;
  int64_t sum = is_token && !p.channel_decay ? fixed_point(p.g[row * p.g_token_stride + head * p.g_head_stride]) : 0;
  if (is_token) {
    tokens.betas[i] = p.beta != nullptr ? p.beta[row * p.beta_token_stride + head * p.beta_head_stride] : 1.0f;
  }
  uint32_t mask[kWords] = {};
#pragma unroll
  for (int w = 0; w < kWords; ++w) mask[w] = w == i / 32 ? 1u << i % 32 : 0;
  for (int32_t reach = 1;; reach *= 2) {
    const bool is_last = reach >= count;
    if (is_token) {
      if (is_last) tokens.parents[i] = above == -1 ? parent : int16_t{-2};
      tokens.jumps[i] = static_cast<int16_t>(above);
      tokens.sums[i] = sum;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (w < words) masks[i * words + w] = is_last && above != -1 ? 0 : mask[w];
      }
    }
    __syncthreads();
    if (is_last) break;
    if (above >= 0) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (w < words) mask[w] |= masks[above * words + w];
      }
      sum += tokens.sums[above];
      above = tokens.jumps[above];
    }
    __syncthreads();
  }
}

}  // namespace pagedtree::cuda
