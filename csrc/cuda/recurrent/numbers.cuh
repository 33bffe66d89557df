// Arithmetic of the delta rule that its kernels share, so that a token has the same bits in each.
#pragma once

#include "cuda/recurrent/elements.cuh"
#include "cuda/tile/reduce.cuh"

namespace pagedtree::cuda {

__device__ __forceinline__ float dot(const Four& a, const Four& b, float sum) {
#pragma unroll
  for (int j = 0; j < 4; ++j) sum = __fmaf_rn(a.x[j], b.x[j], sum);
  return sum;
}

// What a row with this sum of squares is multiplied by.
__device__ __forceinline__ float norm_of(const DeltaRuleParams& p, float squares) {
  return p.l2norm ? 1.0f / sqrtf(squares + p.l2norm_eps) : 1.0f;
}

// ---- decays of heads

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

// ---- products

constexpr int kStep = 16;           // channels of two products; a lane has 4 neighbours of them
constexpr int kPassChannels = 128;  // whose products with the state are one sum

constexpr uint32_t kHighBits = 0xffffe000u;  // that tf32 holds

__device__ __forceinline__ float high_part(float x, uint32_t high_bits = kHighBits) {
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) & high_bits);
}

// fp16 and bf16 are exact in tf32, an element of the state is the sum of two numbers of tf32.
__device__ __forceinline__ void add_split_product(float (&high)[4], float (&low)[4], const float (&a)[4], float b0,
                                                  float b1, uint32_t high_bits = kHighBits) {
  const float b0_high = high_part(b0, high_bits), b1_high = high_part(b1, high_bits);
  ptx::mma_m16n8k8(high, a, b0_high, b1_high);
  ptx::mma_m16n8k8(low, a, b0 - b0_high, b1 - b1_high);
}

// The sum of both products. Where an element is infinite its low part is NaN, and the high part is the result.
__device__ __forceinline__ float joined(float high, float low) { return low != low ? high : high + low; }

// A lane's channels of a key and of the query of the same token: a row of a tile, and the row 8 below.
struct TokenPairs {
  uint2 key, query;
};

// Adds the products of a step with keys.
template <typename T>
__device__ __forceinline__ void add_key_product(float (&sums)[4], const TokenPairs& rows, uint2 keys) {
  const uint32_t a[4] = {rows.key.x, rows.query.x, rows.key.y, rows.query.y};
  ptx::mma_m16n8k16<T>(sums, a, keys.x, keys.y);
}

// The rows of a step's two products with the state.
struct StepRows {
  float a[2][4];
};
__device__ __forceinline__ StepRows rows_of(const TokenPairs& rows, DType dtype) {
  const Four key = unpack(rows.key, dtype), query = unpack(rows.query, dtype);
  return {{{key.x[0], query.x[0], key.x[1], query.x[1]}, {key.x[2], query.x[2], key.x[3], query.x[3]}}};
}

// A product of keys or queries, times their norms and the decay between them.
__device__ __forceinline__ float decayed(float product, float norms, float decay) {
  return decay == 0.0f ? 0.0f : product * (norms * decay);
}

// What is left of a value when what is predicted is taken away; times beta it is u.
__device__ __forceinline__ float left_of(const DeltaRuleParams& p, float value, float predicted) {
  return p.beta != nullptr ? value - predicted : value;
}

}  // namespace pagedtree::cuda
