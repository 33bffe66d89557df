#pragma once

#include "cpu/isa/tile/vec.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Returns 2^x to 2 ulp; 0 below 2^-127; NaN stays NaN; x above 127 reads as 127.
static inline vfloat exp2(vfloat x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  x = max(splat(-127.0f), min(splat(127.0f), x));
  const vfloat shifted = x + kRound;
  const vfloat f = x - (shifted - kRound);
  // 2^f on [-1/2, 1/2], minimax in relative error (2e-9 before rounding).
  vfloat p = splat(1.53533568e-04f);
  p = muladd(p, f, splat(1.33988744e-03f));
  p = muladd(p, f, splat(9.61843738e-03f));
  p = muladd(p, f, splat(5.55033247e-02f));
  p = muladd(p, f, splat(2.40226479e-01f));
  p = muladd(p, f, splat(6.93147203e-01f));
  p = muladd(p, f, splat(1.0f));
  const vint exponent = bits<vint>(shifted) - (0x4b400000 - 127);  // kRound's bits hold exponent 0
  return p * bits<vfloat>(exponent << 23);
}

// Returns 2^x for weights rounded to bf16: relative error 3e-6, 0 below 2^-125; NaN stays NaN; x is at most 127.
static inline vfloat exp2_weight(vfloat x) {
  constexpr float kRound = 12582912.0f;  // see exp2
  const vfloat shifted = x + kRound;
  const vfloat f = x - (shifted - kRound);
  // 2^f on [-1/2, 1/2], minimax in relative error.
  vfloat p = splat(9.58284e-03f);
  p = muladd(p, f, splat(5.590643e-02f));
  p = muladd(p, f, splat(2.4024099e-01f));
  p = muladd(p, f, splat(6.9312419e-01f));
  p = muladd(p, f, splat(1.0f));
  const vfloat value = bits<vfloat>(bits<vuint>(p) + (bits<vuint>(shifted) << 23));
  return x <= -125.0f ? splat(0.0f) : value;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
