// Arithmetic shared by the kernels of the delta rule, so that their results agree bitwise.
#pragma once

#include "cuda/recurrent/elements.cuh"
#include "cuda/tile/reduce.cuh"

namespace pagedtree::cuda {

__device__ __forceinline__ float dot(const Four& a, const Four& b, float sum) {
#pragma unroll
  for (int j = 0; j < 4; ++j) sum = __fmaf_rn(a.x[j], b.x[j], sum);
  return sum;
}

// Returns the factor that normalizes a row with this sum of squares.
__device__ __forceinline__ float norm_of(const DeltaRuleParams& p, float squares) {
  return p.l2norm ? 1.0f / sqrtf(squares + p.l2norm_eps) : 1.0f;
}

// ---- decays per head

// g as a multiple of 2^-40: sums and their differences are exact in any order. exp(g) is 0 below -128.
__device__ __forceinline__ int64_t fixed_point(float g) {
  return static_cast<int64_t>(max_of(g < 0.0f ? g : 0.0f, -128.0f) * 0x1p40f);
}

// Returns exp(later - earlier).
__device__ __forceinline__ float decay_between(int64_t later, int64_t earlier) {
  const int64_t limit = int64_t{-128} << 40;
  const int64_t difference = max_of(min_of<int64_t>(later - earlier, 0), limit);
  return decay_of<ScalarMath>(static_cast<float>(static_cast<int32_t>(difference >> 16)) * 0x1p-24f);
}

// ---- products

constexpr int kStep = 16;           // channels of two products; a lane has 4 neighbours
constexpr int kPassChannels = 128;  // channels summed before the next pass

constexpr uint32_t kHighBits = 0xffffe000u;  // bits that tf32 keeps

__device__ __forceinline__ float high_part(float x, uint32_t high_bits = kHighBits) {
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) & high_bits);
}

// fp16 and bf16 are exact in tf32; an fp32 element is split into two tf32 parts.
__device__ __forceinline__ void add_split_product(float (&high)[4], float (&low)[4], const float (&a)[4], float b0,
                                                  float b1, uint32_t high_bits = kHighBits) {
  const float b0_high = high_part(b0, high_bits), b1_high = high_part(b1, high_bits);
  ptx::mma_m16n8k8(high, a, b0_high, b1_high);
  ptx::mma_m16n8k8(low, a, b0 - b0_high, b1 - b1_high);
}

// Adds both parts. An infinite element has a NaN low part; its high part is the result.
__device__ __forceinline__ float joined(float high, float low) { return low != low ? high : high + low; }

// A lane's channels of a token's key and query, accumulator rows quad and quad + 8.
struct TokenPairs {
  uint2 key, query;
};

// Adds K @ keys and Q @ keys of a step.
template <typename T>
__device__ __forceinline__ void add_key_product(float (&sums)[4], const TokenPairs& rows, uint2 keys) {
  const uint32_t a[4] = {rows.key.x, rows.query.x, rows.key.y, rows.query.y};
  ptx::mma_m16n8k16<T>(sums, a, keys.x, keys.y);
}

struct StepRows {
  float a[2][4];
};
__device__ __forceinline__ StepRows rows_of(const TokenPairs& rows, DType dtype) {
  const Four key = unpack(rows.key, dtype), query = unpack(rows.query, dtype);
  return {{{key.x[0], query.x[0], key.x[1], query.x[1]}, {key.x[2], query.x[2], key.x[3], query.x[3]}}};
}

// Returns product * norms * decay, and 0 for decay 0 even if the product is infinite.
__device__ __forceinline__ float decayed(float product, float norms, float decay) {
  return decay == 0.0f ? 0.0f : product * (norms * decay);
}

// Returns value minus prediction, which is u / beta.
__device__ __forceinline__ float left_of(const DeltaRuleParams& p, float value, float predicted) {
  return p.beta != nullptr ? value - predicted : value;
}

}  // namespace pagedtree::cuda
