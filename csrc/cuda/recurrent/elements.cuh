// Conversion of fp16, bf16, and fp32 elements in memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/numeric.h"
#include "core/recurrent.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/mma.cuh"

namespace pagedtree::cuda {

template <typename T>
constexpr DType kTypeOf = kIsBFloat16<T> ? DType::kBFloat16 : DType::kFloat16;

// Converts the low half of `bits`.
__device__ __forceinline__ float half_from_bits(uint32_t bits, DType dtype) {
  const uint16_t low = static_cast<uint16_t>(bits);
  return dtype == DType::kFloat16 ? __half2float(__ushort_as_half(low)) : float_from_bfloat16(low);
}

__device__ __forceinline__ float load_half(const void* data, DType dtype, int64_t at) {
  return half_from_bits(static_cast<const uint16_t*>(data)[at], dtype);
}

struct Four {
  float x[4];
};

__device__ __forceinline__ Four unpack(uint2 pairs, DType dtype) {
  return {half_from_bits(pairs.x, dtype), half_from_bits(pairs.x >> 16, dtype), half_from_bits(pairs.y, dtype),
          half_from_bits(pairs.y >> 16, dtype)};
}

__device__ __forceinline__ bool is_aligned(const uint16_t* from) { return reinterpret_cast<uintptr_t>(from) % 8 == 0; }

// Loads four neighbours, at once if 8-byte aligned.
__device__ __forceinline__ uint2 load_pairs(const uint16_t* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint2*>(from);
  return make_uint2(from[0] | uint32_t{from[1]} << 16, from[2] | uint32_t{from[3]} << 16);
}

__device__ __forceinline__ Four load_four_halves(const void* data, DType dtype, int64_t at) {
  const uint16_t* from = static_cast<const uint16_t*>(data) + at;
  return unpack(load_pairs(from, is_aligned(from)), dtype);
}

__device__ __forceinline__ float load_element(const void* data, DType dtype, int64_t at) {
  return dtype == DType::kFloat32 ? static_cast<const float*>(data)[at] : load_half(data, dtype, at);
}

__device__ __forceinline__ void store_element(void* data, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFloat16) {
    static_cast<__half*>(data)[at] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
  }
}

}  // namespace pagedtree::cuda
