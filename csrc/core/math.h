// exp and log with the same bits on every machine: fixed polynomials, explicit fused multiply-adds, no libm. Every
// seeded draw depends on these bits.
// M supplies a scalar or vector type and its operations (ScalarMath here, VectorMath in cpu/isa/tile/math.h).
#pragma once

#include <cstring>

#include "core/common.h"

namespace pagedtree {

struct ScalarMath {
  using Float = float;
  using Int = int32_t;
  using Uint = uint32_t;
  static PT_HOST_DEVICE float splat(float x) { return x; }
  static PT_HOST_DEVICE uint32_t splat(uint32_t x) { return x; }
  static PT_HOST_DEVICE float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
  }
  static PT_HOST_DEVICE float max(float a, float b) { return a > b ? a : b; }
  template <typename T>
  static PT_HOST_DEVICE T select(bool condition, T yes, T no) {
    return condition ? yes : no;
  }
  template <typename To, typename From>
  static PT_HOST_DEVICE To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
  }
  static PT_HOST_DEVICE float to_float(int32_t x) { return static_cast<float>(x); }
  static PT_HOST_DEVICE float to_float(uint32_t x) { return static_cast<float>(x); }
  static PT_HOST_DEVICE uint32_t to_uint(float x) { return static_cast<uint32_t>(x); }
  static PT_HOST_DEVICE void multiply(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
#if defined(__CUDA_ARCH__)
    // nvcc would emit two instructions for a 64-bit product.
    high = __umulhi(a, b);
    low = a * b;
#else
    const uint64_t product = static_cast<uint64_t>(a) * b;
    high = static_cast<uint32_t>(product >> 32);
    low = static_cast<uint32_t>(product);
#endif
  }
};

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;
// ln 2 in two parts; the first times an exponent is exact.
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;

// Returns e^x for x in [-87, 88], relative error below 2e-7; smaller x reads as -87.
template <typename M>
PT_HOST_DEVICE typename M::Float exp_exact(typename M::Float x) {
  x = M::max(x, M::splat(-87.0f));
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const auto shifted = x * kLog2E + kRound;
  const auto n = shifted - kRound;
  auto r = M::fma(n, M::splat(-kLn2High), x);
  r = M::fma(n, M::splat(-kLn2Low), r);
  // Taylor series on |r| <= ln(2) / 2.
  auto p = M::splat(1.0f / 5040);
  p = M::fma(p, r, M::splat(1.0f / 720));
  p = M::fma(p, r, M::splat(1.0f / 120));
  p = M::fma(p, r, M::splat(1.0f / 24));
  p = M::fma(p, r, M::splat(1.0f / 6));
  p = M::fma(p, r, M::splat(0.5f));
  p = M::fma(p, r, M::splat(1.0f));
  p = M::fma(p, r, M::splat(1.0f));
  // p * 2^n: the low bits of `shifted` hold n, and the product is normal.
  const auto exponent = M::template bits<typename M::Uint>(shifted) << 23;
  return M::template bits<typename M::Float>(M::template bits<typename M::Uint>(p) + exponent);
}

// Returns exponent * ln 2 + log(1 + t) for 1 + t in [sqrt(1/2), sqrt(2)), relative error below 3e-7.
template <typename M>
PT_HOST_DEVICE typename M::Float log_of_parts(typename M::Float exponent, typename M::Float t) {
  // Minimax fit of (log(1 + t) - t + t^2 / 2) / t^3.
  auto p = M::splat(0.087003596f);
  p = M::fma(p, t, M::splat(-0.142674759f));
  p = M::fma(p, t, M::splat(0.149147868f));
  p = M::fma(p, t, M::splat(-0.165775865f));
  p = M::fma(p, t, M::splat(0.199630618f));
  p = M::fma(p, t, M::splat(-0.250013381f));
  p = M::fma(p, t, M::splat(0.333339095f));
  const auto t2 = t * t;
  const auto tail = M::fma(t2 * t, p, t2 * -0.5f);
  return M::fma(exponent, M::splat(kLn2High), t + M::fma(exponent, M::splat(kLn2Low), tail));
}

// Splits a normal y > 0 into 2^exponent * (1 + t), 1 + t in [sqrt(1/2), sqrt(2)).
template <typename M>
PT_HOST_DEVICE void split_for_log(typename M::Float y, typename M::Float& exponent, typename M::Float& t) {
  constexpr int32_t kSqrtHalf = 0x3f3504f3;
  const auto offset = M::template bits<typename M::Int>(y) - kSqrtHalf;
  exponent = M::to_float(offset >> 23);
  t = M::template bits<typename M::Float>((offset & 0x7fffff) + kSqrtHalf) - 1.0f;
}

// Requires a normal y > 0.
template <typename M>
PT_HOST_DEVICE typename M::Float log_exact(typename M::Float y) {
  typename M::Float exponent, t;
  split_for_log<M>(y, exponent, t);
  return log_of_parts<M>(exponent, t);
}

// Returns an Exp(1) variate -log(1 - v), v = (word + 1/2) 2^-32, accurate at both ends.
template <typename M>
PT_HOST_DEVICE typename M::Float exponential_of_word(typename M::Uint word) {
  constexpr float kScale = 1.0f / 4294967296.0f;
  typename M::Float exponent, t;
  split_for_log<M>((M::to_float(~word) + 0.5f) * kScale, exponent, t);  // 1 - v
  // 1 - v loses the low bits of a small v; t is v itself there.
  const auto v = (M::to_float(word) + 0.5f) * kScale;
  const auto small = v < 0.25f;
  exponent = M::select(small, M::splat(0.0f), exponent);
  t = M::select(small, -v, t);
  return -log_of_parts<M>(exponent, t);
}

}  // namespace pagedtree
