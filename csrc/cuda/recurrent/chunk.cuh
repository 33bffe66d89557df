// A chunk of tokens of one value head, and 32 columns of its state, in shared memory.
#pragma once

#include "cuda/recurrent/elements.cuh"

namespace pagedtree::cuda {

constexpr int kWarps = 8;
constexpr int kColumns = 32;  // of the state: one for each lane
constexpr int kBlock = 8;     // tokens that are solved together
static_assert(kWarps * 32 >= kMaxRecurrentNodes && kWarps == kBlock);

// What the lanes of a tensor core's operand read at once lies in different banks.
constexpr int kStateStride = kColumns + 2, kReadStride = kColumns + 8;
constexpr int kMaskWords = kMaxRecurrentNodes / 32;

struct ChunkShared {
  int64_t sums[kMaxRecurrentNodes];     // of g from the first token of the path on, see fixed_point()
  int32_t rows[kMaxRecurrentNodes];     // of the tokens
  float betas[kMaxRecurrentNodes];      // 1 without
  float norms[kMaxRecurrentNodes];      // of the keys: what they are multiplied by
  int16_t parents[kMaxRecurrentNodes];  // -1: none, -2: cannot be reached
  int16_t jumps[kMaxRecurrentNodes];    // scratch of link()
};

// The rest of shared memory, whose sizes depend on the call.
struct Chunk {
  const DeltaRuleParams& p;
  ChunkShared& shared;
  int32_t group;  // tokens that are weighed together, blocks of 8
  int32_t words;  // of a mask
  int32_t weight_stride;
  int32_t head, key_head;
  int32_t column;   // of the lane
  float* state;     // [Dk, kStateStride]
  float* u;         // [capacity, kColumns]
  float* weights;   // [key or query, group, weight_stride]: of the tokens above a token
  float* reads;     // [key or query, group, kReadStride]: what it reads of the state, with the decays of its path
  uint32_t* masks;  // [capacity, words]: the tokens of its path, itself included; none where it cannot be reached

  __device__ Chunk(const DeltaRuleParams& params, int32_t capacity, int32_t of_group, int32_t of_head, int32_t of_lane);
  __device__ float* weights_of(int which, int32_t row) const { return weights + (which * group + row) * weight_stride; }
  __device__ float* reads_of(int which, int32_t row) const { return reads + (which * group + row) * kReadStride; }
  // Which of the tokens 8 * block .. 8 * block + 7 are on the path of token i.
  __device__ uint32_t ancestors(int32_t i, int32_t block) const {
    return masks[i * words + block / 4] >> block % 4 * 8 & 0xffu;
  }
};

struct ChunkSizes {
  int32_t words{}, weight_stride{};
  int64_t u{}, weights{}, reads{}, masks{};  // where they begin
  int64_t bytes{};

  __host__ __device__ constexpr ChunkSizes(int32_t key_dim, int32_t capacity, int32_t group) {
    words = (capacity + 31) / 32;
    weight_stride = words * 32 + kBlock;
    u = static_cast<int64_t>(sizeof(ChunkShared)) + key_dim * kStateStride * 4;
    weights = u + capacity * kColumns * 4;
    reads = weights + 2 * group * weight_stride * 4;
    masks = reads + 2 * group * kReadStride * 4;
    bytes = masks + capacity * words * 4;
  }
};

static_assert(ChunkSizes(kMaxRecurrentDim, kMaxRecurrentNodes, kBlock).bytes <= 99 << 10, "what every GPU has");

__device__ __forceinline__ Chunk::Chunk(const DeltaRuleParams& params, int32_t capacity, int32_t of_group,
                                        int32_t of_head, int32_t of_lane)
    : p(params), shared(ptx::shared<ChunkShared>()), group(of_group), head(of_head), column(of_lane) {
  key_head = head / p.group_size;
  const ChunkSizes sizes(p.key_dim, capacity, group);
  char* const begin = reinterpret_cast<char*>(&shared);
  words = sizes.words;
  weight_stride = sizes.weight_stride;
  state = reinterpret_cast<float*>(&shared + 1);
  u = reinterpret_cast<float*>(begin + sizes.u);
  weights = reinterpret_cast<float*>(begin + sizes.weights);
  reads = reinterpret_cast<float*>(begin + sizes.reads);
  masks = reinterpret_cast<uint32_t*>(begin + sizes.masks);
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(~0u, x, bits);
  return x;
}

__device__ __forceinline__ float norm_of(const DeltaRuleParams& p, float squares) {
  return p.l2norm ? 1.0f / sqrtf(squares + 1e-6f) : 1.0f;
}

// Where the key of token i begins, and its query.
__device__ __forceinline__ int64_t key_row(const Chunk& t, int32_t i) {
  return t.shared.rows[i] * t.p.k_token_stride + t.key_head * t.p.k_head_stride;
}
__device__ __forceinline__ int64_t query_row(const Chunk& t, int32_t i) {
  return t.shared.rows[i] * t.p.q_token_stride + t.key_head * t.p.q_head_stride;
}
__device__ __forceinline__ int64_t decay_row(const Chunk& t, int32_t i) {
  return t.shared.rows[i] * t.p.g_token_stride + t.head * t.p.g_head_stride;
}

// Multiples of 2^-40: sums of them are exact in any order, and so are the differences of sums, whatever lies between.
// Below -128 a decay is 0.
__device__ __forceinline__ int64_t fixed_point(float g) {
  return static_cast<int64_t>(max_of(g < 0.0f ? g : 0.0f, -128.0f) * 0x1p40f);
}

// exp of such a difference.
__device__ __forceinline__ float decay_between(int64_t later, int64_t earlier) {
  const int64_t limit = int64_t{-128} << 40;
  const int64_t difference = max_of(min_of<int64_t>(later - earlier, 0), limit);
  return decay_of<ScalarMath>(static_cast<float>(static_cast<int32_t>(difference >> 16)) * 0x1p-24f);
}

// The paths of the tokens in shared.rows and shared.parents, and the sums of g along them. One thread for each token:
// in each round it takes over what is known at the end of its own stretch of the path.
__device__ __forceinline__ void link(const Chunk& t, int32_t count) {
  const int32_t i = threadIdx.x;
  const bool is_token = i < count;
  int32_t above = is_token ? t.shared.parents[i] : -2;
  int64_t sum = is_token && !t.p.channel_decay ? fixed_point(t.p.g[decay_row(t, i)]) : 0;
  uint32_t mask[kMaskWords] = {};
#pragma unroll
  for (int w = 0; w < kMaskWords; ++w) mask[w] = w == i / 32 ? 1u << i % 32 : 0;
  for (int32_t reach = 1;; reach *= 2) {
    const bool is_last = reach >= count;
    if (is_token) {
      if (is_last && above != -1) t.shared.parents[i] = -2;
      t.shared.jumps[i] = static_cast<int16_t>(above);
      t.shared.sums[i] = sum;
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) {
        if (w < t.words) t.masks[i * t.words + w] = is_last && above != -1 ? 0 : mask[w];
      }
    }
    __syncthreads();
    if (is_last) break;
    if (above >= 0) {
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) {
        if (w < t.words) mask[w] |= t.masks[above * t.words + w];
      }
      sum += t.shared.sums[above];
      above = t.shared.jumps[above];
    }
    __syncthreads();
  }
  if (is_token) {
    const int64_t at = t.shared.rows[i] * t.p.beta_token_stride + t.head * t.p.beta_head_stride;
    t.shared.betas[i] = t.p.beta != nullptr ? t.p.beta[at] : 1.0f;
  }
  __syncthreads();
}

}  // namespace pagedtree::cuda
