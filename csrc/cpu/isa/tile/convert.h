// kLanes elements from and to fp32. Loads are exact, stores round to nearest even.
#pragma once

#include "cpu/isa/tile/vec.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

typedef uint16_t vhalf __attribute__((vector_size(kLanes * 2)));
typedef uint8_t vbyte __attribute__((vector_size(kLanes)));

// Avoids fp32 subnormals, which the thread may flush to 0.
static inline vfloat float_from_half(vuint half) {
  const vuint magnitude = half & 0x7fffu;
  const vuint normal = (magnitude << 13) + (112u << 23) + bits<vuint>((magnitude >= 0x7c00u) & (112 << 23));
  const vfloat subnormal = __builtin_convertvector(bits<vint>(magnitude), vfloat) * 0x1p-24f;
  const vfloat value = select(magnitude < 0x400u, subnormal, bits<vfloat>(normal));
  return bits<vfloat>(bits<vuint>(value) | (half & 0x8000u) << 16);
}

static inline vfloat float_from_e4m3(vuint code) {
  const vuint magnitude = code & 0x7fu;
  const vuint normal = ((magnitude << 20) + (120u << 23)) | bits<vuint>((magnitude == 0x7fu) & 0x7f800000);
  const vfloat subnormal = __builtin_convertvector(bits<vint>(magnitude), vfloat) * 0x1p-9f;
  const vfloat value = select(magnitude < 8u, subnormal, bits<vfloat>(normal));
  return bits<vfloat>(bits<vuint>(value) | (code & 0x80u) << 24);
}

// Returns bf16 bits in the low halves.
static inline vuint bfloat16_from_float(vfloat v) {
  const vuint word = bits<vuint>(v);
  const vuint rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  return bits<vuint>(v == v ? bits<vint>(rounded) : splat(0x7fc0));
}

// Returns fp16 bits in the low halves. The compiler's fp16 type would call a libgcc function that systems before GCC 12
// lack.
static inline vuint half_from_float(vfloat v) {
  const vuint magnitude = bits<vuint>(v) & 0x7fffffffu;
  // The rounding carry enters the exponent, from 65504 to infinity too.
  const vuint normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  // Subnormals count steps of 2^-24, the spacing of fp32 at 0.5: the addition rounds.
  const vuint subnormal = bits<vuint>(bits<vfloat>(magnitude) + 0.5f) - 0x3f000000u;
  const vuint finite = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  const vuint nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  const vuint code = magnitude < 0x47800000u ? finite : magnitude > 0x7f800000u ? nan : splat(0x7c00u);  // 65536
  return code | (bits<vuint>(v) >> 16 & 0x8000u);
}

template <DType kType>
static inline vfloat load_float(const void* p) {
  if constexpr (kType == DType::kFloat32) {
    return load(static_cast<const float*>(p));
  } else if constexpr (kType == DType::kBFloat16) {
    return bits<vfloat>(__builtin_convertvector(load_as<vhalf>(static_cast<const uint16_t*>(p)), vuint) << 16);
  } else if constexpr (kType == DType::kFloat16) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, load_as<__m256i>(static_cast<const uint16_t*>(p)));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(load_as<__m128i>(static_cast<const uint16_t*>(p)));
#else
    return float_from_half(__builtin_convertvector(load_as<vhalf>(static_cast<const uint16_t*>(p)), vuint));
#endif
  } else {
    return float_from_e4m3(__builtin_convertvector(load_as<vbyte>(static_cast<const uint8_t*>(p)), vuint));
  }
}

template <DType kType>
static inline void store_float(void* p, vfloat v) {
  if constexpr (kType == DType::kFloat32) {
    store(static_cast<float*>(p), v);
  } else if constexpr (kType == DType::kBFloat16) {
#if defined(__AVX512BF16__)
    const auto half = _mm512_cvtneps_pbh(v);
#else
    const vhalf half = __builtin_convertvector(bfloat16_from_float(v), vhalf);
#endif
    std::memcpy(p, &half, sizeof(half));
  } else {
    static_assert(kType == DType::kFloat16);
#if defined(__AVX512F__)
    const __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    const __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vhalf half = __builtin_convertvector(half_from_float(v), vhalf);
#endif
    std::memcpy(p, &half, sizeof(half));
  }
}

template <typename Body>
static inline void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body.template operator()<DType::kFloat32>();
    case DType::kFloat16:
      return body.template operator()<DType::kFloat16>();
    case DType::kBFloat16:
      return body.template operator()<DType::kBFloat16>();
    case DType::kFloat8E4M3:
      return body.template operator()<DType::kFloat8E4M3>();
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
