// Vectors of the instruction set of this translation unit (cpu/isa.h): GCC's vector extension, and intrinsics for
// instructions that it cannot express.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/common.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

#if defined(__AVX512F__) || defined(PAGEDTREE_EMULATE_AVX512)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vuint __attribute__((vector_size(kLanes * 4)));

static inline vfloat splat(float x) { return x - vfloat{}; }
static inline vint splat(int32_t x) { return x - vint{}; }
static inline vuint splat(uint32_t x) { return x - vuint{}; }

template <typename V, typename T>
static inline V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
static inline vfloat load(const float* p) { return load_as<vfloat>(p); }
static inline void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof(v)); }

template <typename To, typename From>
static inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &v, sizeof(to));
  return to;
}

static inline vfloat select(vint mask, vfloat yes, vfloat no) { return mask ? yes : no; }

// Returns a > b ? a : b and a < b ? a : b, hence b if one is NaN: the instructions do so, but GCC does not find them.
static inline vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
static inline vfloat min(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
static inline vuint min(vuint a, vuint b) { return a < b ? a : b; }

// Rounds once, for results independent of the instruction set.
static inline vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  vfloat result{};
  for (int i = 0; i < kLanes; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
#endif
}

// Returns lane i as bit i.
static inline uint32_t lane_bits(vint mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#elif defined(__SSE2__) && !defined(PAGEDTREE_EMULATE_AVX512)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(mask)));
#else
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= (mask[i] < 0 ? 1u : 0u) << i;
  return lanes;
#endif
}

// Packs the selected lanes, followed by arbitrary data. Returns their number.
static inline int compress(float* to, vfloat v, uint32_t lanes) {
#if defined(__AVX512F__)
  store(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), v));
  return __builtin_popcount(lanes);
#else
  int count = 0;
  for (; lanes != 0; lanes &= lanes - 1) to[count++] = v[__builtin_ctz(lanes)];
  return count;
#endif
}

static inline vint lane_index() {
  vint index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

// Computes a * b + c in the fastest way, rounded once or twice.
static inline vfloat muladd(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX2__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

template <int kHalf>
static inline vfloat upper(vfloat v) {
  vint from;
  for (int i = 0; i < kLanes; ++i) from[i] = i ^ kHalf;
  return __builtin_shuffle(v, from);
}

template <int kHalf = kLanes / 2>
static inline float reduce_add(vfloat v) {
  if constexpr (kHalf == 0) {
    return v[0];
  } else {
    return reduce_add<kHalf / 2>(v + upper<kHalf>(v));
  }
}

template <int kHalf = kLanes / 2>
static inline float reduce_max(vfloat v) {
  if constexpr (kHalf == 0) {
    return v[0];
  } else {
    return reduce_max<kHalf / 2>(max(v, upper<kHalf>(v)));
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
