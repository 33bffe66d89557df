// fp32 to e4m3: saturate(value / scale), bitwise equal to the CPU's e4m3_from_float(value / scale).
#pragma once

#include "core/numeric.h"
#include "cuda/tile/mma.cuh"

namespace pagedtree::cuda {

// Correctly rounded where the code depends on it. The compiler's division branches and serializes a thread's numbers.
class Quantizer {
 public:
  __device__ __forceinline__ explicit Quantizer(float scale)
      : scale_(scale), reciprocal_(scale == 1.0f ? 1.0f : 1.0f / scale), limit_(fabsf(scale) * 512.0f) {}

  template <int kCount>
  __device__ __forceinline__ void encode(float (&values)[kCount], uint8_t (&codes)[kCount]) const {
    if (scale_ == 1.0f) {
    } else if (limit_ >= 0x1p-60f && limit_ <= 0x1p60f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = quotient(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] /= scale_;
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float second = i + 1 < kCount ? values[i + 1] : 0.0f;
      const uint32_t pair = codes_of(values[i], second);
      codes[i] = static_cast<uint8_t>(pair);
      if (i + 1 < kCount) codes[i + 1] = static_cast<uint8_t>(pair >> 8);
    }
  }

 private:
  // Multiplies by the reciprocal and corrects twice by the remainder (Markstein, IBM Journal of Research and
  // Development, 1990). Magnitudes are clamped to `limit_`, which gets the largest code. Far smaller ones get code 0
  // despite an inexact remainder. A zero's remainder has no sign.
  __device__ __forceinline__ float quotient(float value) const {
    const float bounded = fabsf(value) > limit_ ? copysignf(limit_, value) : value;
    const float first = bounded * reciprocal_;
    const float second = __fmaf_rn(__fmaf_rn(-first, scale_, bounded), reciprocal_, first);
    return copysignf(__fmaf_rn(__fmaf_rn(-second, scale_, bounded), reciprocal_, second), first);
  }

  static __device__ __forceinline__ uint32_t codes_of(float first, float second) {
    if constexpr (kConvertsFloat8) {
      return ptx::e4m3_from_floats(first, second);
    } else {
      return e4m3_from_float(first) | uint32_t{e4m3_from_float(second)} << 8;
    }
  }

  float scale_, reciprocal_, limit_;
};

}  // namespace pagedtree::cuda
