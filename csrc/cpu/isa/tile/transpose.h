#pragma once

#include "cpu/isa/tile/vec.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

typedef int16_t vshort __attribute__((vector_size(kLanes * 4)));

// Returns a0 b0 a1 b1 ... of the lower halves, then of the upper halves. Index: integer vector of V's size.
template <typename V, typename Index>
static inline void interleave_by(V a, V b, V& low, V& high) {
  constexpr int kCount = sizeof(V) / sizeof(a[0]);
  Index first, second;
  for (int i = 0; i < kCount; ++i) {
    first[i] = i / 2 + (i % 2) * kCount;
    second[i] = first[i] + kCount / 2;
  }
  low = __builtin_shuffle(a, b, first);
  high = __builtin_shuffle(a, b, second);
}
static inline void interleave(vshort a, vshort b, vshort& low, vshort& high) {
  interleave_by<vshort, vshort>(a, b, low, high);
}
static inline void interleave(vfloat a, vfloat b, vfloat& low, vfloat& high) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256 even = _mm256_unpacklo_ps(a, b), odd = _mm256_unpackhi_ps(a, b);
  low = _mm256_permute2f128_ps(even, odd, 0x20);
  high = _mm256_permute2f128_ps(even, odd, 0x31);
#else
  interleave_by<vfloat, vint>(a, b, low, high);
#endif
}

// Transposes by log2(kLanes) perfect shuffles.
static inline void transpose(vfloat (&rows)[kLanes]) {
  for (int step = 1; step < kLanes; step *= 2) {
    vfloat next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) interleave(rows[i], rows[i + kLanes / 2], next[2 * i], next[2 * i + 1]);
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
