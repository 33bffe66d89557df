// Elements of either 16-bit type, or of fp32, in memory and as fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/numeric.h"
#include "core/recurrent.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

__device__ __forceinline__ float load_element(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return dtype == DType::kFloat16 ? float_from_half(bits) : float_from_bfloat16(bits);
}

__device__ __forceinline__ void store_element(void* data, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFloat16) {
    static_cast<__half*>(data)[at] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
  }
}

}  // namespace pagedtree::cuda
