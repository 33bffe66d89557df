// The functions of core/math.h and core/philox.h on vectors: bit for bit what they give on scalars.
#pragma once

#include "core/math.h"
#include "cpu/tile/vec.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct VectorMath {
  using Float = vfloat;
  using Int = vint;
  using Uint = vuint;
  static inline vfloat splat(float x) { return PAGEDTREE_ISA::splat(x); }
  static inline vuint splat(uint32_t x) { return PAGEDTREE_ISA::splat(x); }
  static inline vfloat fma(vfloat a, vfloat b, vfloat c) { return PAGEDTREE_ISA::fma(a, b, c); }
  static inline vfloat select(vint mask, vfloat yes, vfloat no) { return PAGEDTREE_ISA::select(mask, yes, no); }
  template <typename To, typename From>
  static inline To bits(From from) {
    return PAGEDTREE_ISA::bits<To>(from);
  }
  static inline vfloat to_float(vint x) { return __builtin_convertvector(x, vfloat); }
  // Rounded once: the halves are exact.
  static inline vfloat to_float(vuint x) {
    return to_float(bits<vint>(x >> 16)) * 65536.0f + to_float(bits<vint>(x & 0xffffu));
  }
  static inline vint to_int(vfloat x) { return __builtin_convertvector(x, vint); }
  static inline vuint to_uint(vfloat x) {
    const vint large = x >= 2147483648.0f;
    const vint low = to_int(x - select(large, splat(2147483648.0f), splat(0.0f)));
    return bits<vuint>(low) ^ (bits<vuint>(large) & 0x80000000u);
  }

  static inline void multiply(vuint a, uint32_t b, vuint& high, vuint& low) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i lanes = reinterpret_cast<__m256i>(a), factor = _mm256_set1_epi32(static_cast<int>(b));
    const __m256i even = _mm256_mul_epu32(lanes, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), factor);
    high = reinterpret_cast<vuint>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA));
    low = reinterpret_cast<vuint>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA));
#else
    typedef uint64_t vulong __attribute__((vector_size(kLanes * 8)));
    const vulong product = __builtin_convertvector(a, vulong) * static_cast<uint64_t>(b);
    high = __builtin_convertvector(product >> 32, vuint);
    low = __builtin_convertvector(product, vuint);
#endif
  }
};

// a0 b0 a1 b1 ..., in two vectors.
static inline void zip(vuint a, vuint b, vuint& first, vuint& second) {
  vuint low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = static_cast<uint32_t>(i / 2 + (i % 2) * kLanes);
    high[i] = low[i] + kLanes / 2;
  }
  first = __builtin_shuffle(a, b, low);
  second = __builtin_shuffle(a, b, high);
}

// Blocks of four words side by side, word w of block i in words[w][i], into one run: block 0's four, block 1's, ...
static inline void interleave_blocks(vuint words[4]) {
  vuint even[2], odd[2];
  zip(words[0], words[2], even[0], even[1]);
  zip(words[1], words[3], odd[0], odd[1]);
  zip(even[0], odd[0], words[0], words[1]);
  zip(even[1], odd[1], words[2], words[3]);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
