// Encodes TMA's tensor maps: by the driver on a GPU, as plain structs under simt.
#pragma once

#include <optional>

#include "core/common.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx_sm90.cuh"
#include "cuda/tile/variants.h"

#if defined(__CUDACC__)
#include <cudaTypedefs.h>

#include "cuda/tile/latest.h"
#endif

namespace pagedtree::cuda {

// A tensor of 16-bit elements with contiguous columns. Dimensions are listed from the innermost.
struct MappedTensor {
  const void* data;
  uint64_t sizes[5];
  uint64_t strides[4];  // bytes, without the columns
  uint32_t box[5];

  bool operator==(const MappedTensor&) const = default;
};

#if defined(__CUDACC__)

inline std::optional<ptx::TensorMap> encoded_map(const MappedTensor& t) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    check_cuda(status, "cuTensorMapEncodeTiled of the driver");
    if (found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  if (encode == nullptr) return std::nullopt;
  constexpr auto kPromotion =
      PAGEDTREE_L2_BYTES == 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  constexpr cuuint32_t kDense[5] = {1, 1, 1, 1, 1};
  ptx::TensorMap made;
  // One type for fp16 and bf16: the copy does not interpret them.
  const CUresult status =
      encode(&made.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(t.data), t.sizes, t.strides, t.box, kDense,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? std::optional(made) : std::nullopt;
}

// Cached: successive steps read the same caches.
inline std::optional<ptx::TensorMap> tensor_map(const MappedTensor& t) {
  thread_local Latest<MappedTensor, std::optional<ptx::TensorMap>> latest;
  return latest.at(t.data, t, [&] { return encoded_map(t); });
}

#else

inline std::optional<ptx::TensorMap> tensor_map(const MappedTensor& t) {
  if (simt::options().refuses_maps) return std::nullopt;
  ptx::TensorMap made{t.data, 2, {}, {}, {}};
  for (int i = 0; i < 5; ++i) {
    made.sizes[i] = t.sizes[i];
    made.box[i] = t.box[i];
    if (i < 4) made.strides[i] = t.strides[i];
  }
  return made;
}

#endif

}  // namespace pagedtree::cuda
