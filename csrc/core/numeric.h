// Conversions between fp32 and narrower formats on raw bits: equal on every machine, branch-free so that loops
// vectorise.
#pragma once

#include "core/common.h"

namespace pagedtree {

PT_HOST_DEVICE float float_from_bfloat16(uint16_t bits) { return __builtin_bit_cast(float, uint32_t{bits} << 16); }

PT_HOST_DEVICE float float_from_half(uint16_t bits) {
  const uint32_t magnitude = uint32_t{bits} & 0x7fffu;
  const uint32_t sign = (uint32_t{bits} & 0x8000u) << 16;
  // Subnormals count steps of 2^-24: place them below 2^-14, then subtract 2^-14.
  const float subnormal = __builtin_bit_cast(float, 0x38800000u | (magnitude << 13)) - 0x1p-14f;
  const uint32_t rebias = magnitude >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
  const uint32_t normal = (magnitude << 13) + rebias;
  return __builtin_bit_cast(float, sign | (magnitude < 0x0400u ? __builtin_bit_cast(uint32_t, subnormal) : normal));
}

// Rounds to nearest even; values beyond +-448 saturate, NaN becomes 0x7f.
PT_HOST_DEVICE uint8_t e4m3_from_float(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t clamped = min_of(magnitude, 0x43e00000u);  // 448
  // The bias falls from 127 to 7; the rounding carry enters the exponent as it should.
  const uint32_t normal = ((clamped + 0x7ffffu + ((clamped >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
  // Subnormals count steps of 2^-9, the spacing of fp32 at 2^14: the addition rounds.
  const float shifted = __builtin_bit_cast(float, clamped) + 0x1p14f;
  const uint32_t subnormal = __builtin_bit_cast(uint32_t, shifted) - 0x46800000u;
  const uint32_t code = clamped < 0x3c800000u ? subnormal : normal;  // 2^-6
  return static_cast<uint8_t>(magnitude > 0x7f800000u ? 0x7fu : code | ((bits >> 24) & 0x80u));
}

}  // namespace pagedtree
