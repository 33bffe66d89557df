// Stored logits: single, words of 16 bytes, and groups of four.
#pragma once

#include "core/numeric.h"
#include "core/sampling.h"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

constexpr int kWordBytes = 16;

// Four logits of a word. 16-bit logits, two per register, leave z and w unused.
using Four = uint4;

__device__ __forceinline__ float half_value(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

template <DType kDType>
struct StoredLogits {
  static constexpr bool kWide = kDType == DType::kFloat32;
  static constexpr bool kHalf = kDType == DType::kFloat16;
  using One = std::conditional_t<kWide, float, uint16_t>;
  using Number = std::conditional_t<kWide, float, std::conditional_t<kHalf, __half, __nv_bfloat16>>;

  __device__ explicit StoredLogits(DType) {}
  static __device__ bool wide() { return kWide; }
  static __device__ float largest() { return kWide ? kMaxFloat : kHalf ? kMaxFloat16 : kMaxBFloat16; }
  static __device__ uint32_t infinity() { return kWide ? 0x7f800000u : kHalf ? 0x7c00u : 0x7f80u; }
  // Number of order-key digits that differ between logits.
  static __device__ int digits() { return kWide ? 4 : kHalf ? 3 : 2; }

  static __device__ uint32_t bits(const void* row, int token) {
    return kWide ? static_cast<const uint32_t*>(row)[token] : uint32_t{static_cast<const uint16_t*>(row)[token]};
  }
  static __device__ float value(uint32_t bits) {
    if constexpr (kWide) return ScalarMath::bits<float>(bits);
    const uint16_t narrow = static_cast<uint16_t>(bits);
    return kHalf ? half_value(narrow) : float_from_bfloat16(narrow);
  }

  // Returns the elementwise maximum of two registers; NaN wins.
  static __device__ uint32_t larger(uint32_t a, uint32_t b) { return ptx::max_nan<Number>(a, b); }
  // Returns the largest number in the registers; NaN wins.
  template <int kCount>
  static __device__ __forceinline__ float largest_of(const uint32_t (&registers)[kCount]) {
    uint32_t most = registers[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) most = larger(most, registers[i]);
    if constexpr (!kWide) most = larger(most, most >> 16 | most << 16);
    return value(most);
  }
  static __device__ float largest_of_four(const Four& four) {
    if constexpr (kWide) {
      const uint32_t registers[] = {four.x, four.y, four.z, four.w};
      return largest_of(registers);
    } else {
      const uint32_t registers[] = {four.x, four.y};
      return largest_of(registers);
    }
  }
};

// Logits of a runtime dtype: branches are uniform.
constexpr DType kAnyDType = static_cast<DType>(-1);
template <>
struct StoredLogits<kAnyDType> {
  DType dtype;

  __device__ explicit StoredLogits(DType of_row) : dtype(of_row) {}
  __device__ bool wide() const { return dtype == DType::kFloat32; }
  __device__ bool half() const { return dtype == DType::kFloat16; }
  __device__ float largest() const { return wide() ? kMaxFloat : half() ? kMaxFloat16 : kMaxBFloat16; }
  __device__ uint32_t infinity() const { return wide() ? 0x7f800000u : half() ? 0x7c00u : 0x7f80u; }
  __device__ int digits() const { return wide() ? 4 : half() ? 3 : 2; }

  __device__ uint32_t bits(const void* row, int token) const {
    return wide() ? static_cast<const uint32_t*>(row)[token] : uint32_t{static_cast<const uint16_t*>(row)[token]};
  }
  __device__ float value(uint32_t bits) const {
    if (wide()) return ScalarMath::bits<float>(bits);
    const uint16_t narrow = static_cast<uint16_t>(bits);
    return half() ? half_value(narrow) : float_from_bfloat16(narrow);
  }

  template <int kCount>
  __device__ __forceinline__ float largest_of(const uint32_t (&registers)[kCount]) const {
    if (wide()) return StoredLogits<DType::kFloat32>::largest_of(registers);
    return half() ? StoredLogits<DType::kFloat16>::largest_of(registers)
                  : StoredLogits<DType::kBFloat16>::largest_of(registers);
  }
  __device__ __forceinline__ float largest_of_four(const Four& four) const {
    if (wide()) return StoredLogits<DType::kFloat32>::largest_of_four(four);
    return half() ? StoredLogits<DType::kFloat16>::largest_of_four(four)
                  : StoredLogits<DType::kBFloat16>::largest_of_four(four);
  }
};

template <typename Stored>
__device__ int bytes_of_one(const Stored& stored) {
  return stored.wide() ? 4 : 2;
}

template <typename Stored>
__device__ __forceinline__ uint32_t number_of(const Stored& stored, const uint32_t (&word)[4], int i) {
  return stored.wide() ? word[i % 4] : word[i / 2] >> i % 2 * 16 & 0xffffu;
}

template <typename Stored>
__device__ __forceinline__ void convert_four(const Stored& stored, const Four& from, float (&four)[4]) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = stored.value(stored.wide() ? words[i] : words[i / 2] >> i % 2 * 16 & 0xffffu);
}

// Returns the bits of a clean logit: -inf for NaN or a forbidden token, the largest finite number for +inf.
template <typename Stored>
__device__ __forceinline__ uint32_t clean_bits(const Stored& stored, uint32_t bits, bool allowed) {
  const uint32_t infinity = stored.infinity(), sign = stored.wide() ? 0x80000000u : 0x8000u;
  const bool is_nan = (bits & ~sign) > infinity;
  if (!allowed || is_nan) return infinity | sign;
  return bits == infinity ? infinity - 1 : bits;
}

// Bit i of `allowed` is for element i.
template <typename Stored>
__device__ __forceinline__ uint4 clean_word(const Stored& stored, uint4 word, uint32_t allowed) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {  // rotates the registers
    const uint32_t clean = stored.wide() ? clean_bits(stored, word.x, allowed & 1u)
                                         : clean_bits(stored, word.x & 0xffffu, allowed & 1u) |
                                               clean_bits(stored, word.x >> 16, allowed & 2u) << 16;
    word = {word.y, word.z, word.w, clean};
    allowed >>= stored.wide() ? 1 : 2;
  }
  return word;
}

// Returns sixteen bytes of two neighbouring words, from byte `skew`.
__device__ __forceinline__ uint4 bytes_from(const uint4& first, const uint4& second, uint32_t skew) {
  uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int by = 2; by > 0; --by) {  // by registers; each step keeps the next one's inputs
#pragma unroll
    for (int i = 0; i + by < 8; ++i) {
      if (skew & 4u * by) words[i] = words[i + by];
    }
  }
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = __funnelshift_r(words[i], words[i + 1], skew % 4 * 8);
  return {out[0], out[1], out[2], out[3]};
}

}  // namespace pagedtree::cuda
