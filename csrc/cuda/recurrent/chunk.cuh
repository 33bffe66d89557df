// A CTA's chunk of tokens of one value head, and 32 columns of its state.
#pragma once

#include "cuda/recurrent/path_decays.cuh"

namespace pagedtree::cuda {

constexpr int kWarps = 8;
constexpr int kColumns = 32;  // of the state, one per lane
constexpr int kBlock = 8;     // tokens per forward substitution
static_assert(kWarps * 32 >= kMaxRecurrentNodes && kWarps == kBlock);

// Padding against bank conflicts of mma operands.
constexpr int kStateStride = kColumns + 2, kReadStride = kColumns + 8;

using ChunkShared = LinkedTokens<kMaxRecurrentNodes>;

// The launch-sized arrays behind ChunkShared.
struct Chunk {
  static constexpr int kParts = kMaxRecurrentDim / kPassChannels;
  const DeltaRuleParams& p;
  ChunkShared& shared;
  int32_t group;  // tokens per group, a multiple of kBlock
  int32_t words;  // per mask
  int32_t weight_stride;
  int32_t head, key_head;
  int32_t column;      // of the lane
  float* state;        // [Dk padded with zeros to kStep, kStateStride]
  float* u;            // [capacity, kColumns]
  float* weights;      // [A or C, group, weight_stride] for the token's ancestors
  float* reads;        // [key or query, group, kReadStride]: S0.T @ (D(n, 0) * row)
  uint32_t* masks;     // [capacity, words]: path with the token itself; 0 if unreachable
  float* query_norms;  // [group], aliases the scratch of link()

  __device__ Chunk(const DeltaRuleParams& params, int32_t capacity, int32_t of_group, int32_t of_head, int32_t of_lane);
  __device__ float* weights_of(int which, int32_t row) const { return weights + (which * group + row) * weight_stride; }
  __device__ float* reads_of(int which, int32_t row) const { return reads + (which * group + row) * kReadStride; }
  __device__ float query_norm(int32_t, int32_t row) const { return p.out != nullptr ? query_norms[row] : 1.0f; }
  __device__ PathDecays path_decays(int32_t i) const { return path_decays_of(p, shared.rows[i], head); }
  // Returns the bits of block's tokens that are on the path of token i.
  __device__ uint32_t ancestors(int32_t i, int32_t block) const {
    return masks[i * words + block / 4] >> block % 4 * 8 & 0xffu;
  }
};

__host__ __device__ constexpr int32_t padded_channels(int32_t key_dim) { return (key_dim + kStep - 1) / kStep * kStep; }

struct ChunkSizes {
  int32_t words{}, weight_stride{};
  int32_t u{}, weights{}, reads{}, masks{};  // byte offsets
  int32_t bytes{};

  __host__ __device__ constexpr ChunkSizes(int32_t key_dim, int32_t capacity, int32_t group) {
    words = (capacity + 31) / 32;
    weight_stride = words * 32 + kBlock;
    u = static_cast<int32_t>(sizeof(ChunkShared)) + padded_channels(key_dim) * kStateStride * 4;
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
  query_norms = reinterpret_cast<float*>(shared.jumps);
}

__device__ __forceinline__ int64_t key_row(const Chunk& t, int32_t i) {
  return t.shared.rows[i] * t.p.k_token_stride + t.key_head * t.p.k_head_stride;
}
__device__ __forceinline__ int64_t query_row(const Chunk& t, int32_t i) {
  return t.shared.rows[i] * t.p.q_token_stride + t.key_head * t.p.q_head_stride;
}
__device__ __forceinline__ int64_t decay_row(const Chunk& t, int32_t i) {
  return t.shared.rows[i] * t.p.g_token_stride + t.head * t.p.g_head_stride;
}

// Computes the norms of a group's keys and queries, one row per warp.
__device__ __forceinline__ void find_norms(const Chunk& t, int32_t begin, int32_t count) {
  const int32_t kinds = t.p.out == nullptr ? 1 : 2, end = min_of(t.group, count - begin) * kinds;
#pragma unroll 1
  for (int32_t job = threadIdx.x / 32; job < end; job += kWarps) {
    const int32_t row = job / kinds, i = begin + row;
    const bool is_key = job % kinds == 0;
    float norm = 1.0f;
    if (t.p.l2norm) {
      float squares = 0.0f;
#pragma unroll 1
      for (int32_t c = threadIdx.x % 32 * 4; c < t.p.key_dim; c += 128) {
        const int64_t from = is_key ? key_row(t, i) : query_row(t, i);
        const Four x = load_four_halves(is_key ? t.p.k : t.p.q, t.p.dtype, from + c);
        squares = dot(x, x, squares);
      }
      norm = norm_of(t.p, warp_sum(squares));
    }
    if (threadIdx.x % 32 == 0) (is_key ? t.shared.norms[i] : t.query_norms[row]) = norm;
  }
  __syncthreads();
}

}  // namespace pagedtree::cuda
