// Conversion of single elements of caches and outputs to and from fp32.
#pragma once

#include "cuda/tile/mma.cuh"

namespace pagedtree::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
// The exponent bias of e4m3 is 120 smaller. The product also normalizes subnormals.
__device__ __forceinline__ float to_float(Float8E4M3 x) {
  const uint32_t magnitude = x.code & 0x7fu, sign = (x.code & 0x80u) << 24;
  const uint32_t value = bits_as<uint32_t>(bits_as<float>(magnitude << 20) * 0x1p120f);
  return bits_as<float>(sign | (magnitude == 0x7fu ? 0x7fc00000u : value));
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else if constexpr (kIsBFloat16<T>) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

}  // namespace pagedtree::cuda
