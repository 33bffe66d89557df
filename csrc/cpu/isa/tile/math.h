// core/math.h and core/philox.h on vectors, with equal bits.
#pragma once

#include "core/philox.h"
#include "cpu/isa/tile/vec.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct VectorMath {
  using Float = vfloat;
  using Int = vint;
  using Uint = vuint;
  static inline vfloat splat(float x) { return PAGEDTREE_ISA::splat(x); }
  static inline vuint splat(uint32_t x) { return PAGEDTREE_ISA::splat(x); }
  static inline vfloat fma(vfloat a, vfloat b, vfloat c) { return PAGEDTREE_ISA::fma(a, b, c); }
  static inline vfloat max(vfloat a, vfloat b) { return PAGEDTREE_ISA::max(a, b); }
  static inline vfloat select(vint mask, vfloat yes, vfloat no) { return PAGEDTREE_ISA::select(mask, yes, no); }
  template <typename To, typename From>
  static inline To bits(From from) {
    return PAGEDTREE_ISA::bits<To>(from);
  }
  static inline vfloat to_float(vint x) { return __builtin_convertvector(x, vfloat); }
  // Rounds once, since both halves are exact.
  static inline vfloat to_float(vuint x) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtepu32_ps(0xffff, reinterpret_cast<__m512i>(x));
#else
    return to_float(bits<vint>(x >> 16)) * 65536.0f + to_float(bits<vint>(x & 0xffffu));
#endif
  }
  static inline vint to_int(vfloat x) { return __builtin_convertvector(x, vint); }
  static inline vuint to_uint(vfloat x) {
#if defined(__AVX512F__)
    return reinterpret_cast<vuint>(_mm512_maskz_cvttps_epu32(0xffff, x));
#else
    const vint large = x >= 2147483648.0f;
    const vint low = to_int(x - select(large, splat(2147483648.0f), splat(0.0f)));
    return bits<vuint>(low) ^ (bits<vuint>(large) & 0x80000000u);
#endif
  }
};

typedef uint64_t vulong __attribute__((vector_size(kLanes * 4)));

// Philox on half the lanes, in the low halves of 64 bits, as multiplication needs; garbage above.
struct PhiloxMath {
  using Uint = vulong;
  static inline vulong splat(uint32_t x) { return uint64_t{x} - vulong{}; }
  static inline void multiply(vulong a, uint32_t b, vulong& high, vulong& low) {
#if defined(__AVX512F__)
    low = reinterpret_cast<vulong>(
        _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), _mm512_set1_epi64(static_cast<int64_t>(b))));
#elif defined(__AVX2__)
    low = reinterpret_cast<vulong>(
        _mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(static_cast<int64_t>(b))));
#else
    low = (a & 0xffffffffu) * b;
#endif
    high = low >> 32;
  }
};

static inline void philox_lanes(uint64_t seed, int64_t position, vuint index, RandomUse use, vuint words[4]) {
  vulong even[4], odd[4];
  philox<PhiloxMath>(seed, position, bits<vulong>(index), use, even);
  philox<PhiloxMath>(seed, position, bits<vulong>(index) >> 32, use, odd);
  for (int w = 0; w < 4; ++w) words[w] = bits<vuint>((even[w] & 0xffffffffu) | odd[w] << 32);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
