// Makes the maps by which TMA reads tensors.
#pragma once

#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx_sm90.cuh"

namespace pagedtree::cuda {

// A tensor of 16-bit elements in global memory, the innermost axis first, and the box of it that one load copies.
struct TensorBoxes {
  uint64_t sizes[4];
  uint64_t strides[3];  // in bytes, multiples of 16, of all axes but the innermost, whose elements are neighbours
  uint32_t box[4];      // 64 of the innermost axis, which are the 128 bytes that the swizzle is for
};

#if defined(__CUDACC__)

// The driver's function, found at run time: nothing is linked to the driver's library.
inline ptx::TensorMap tensor_map(const void* base, const TensorBoxes& tensor) {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault),
             "cuTensorMapEncodeTiled");
#else
  check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault), "cuTensorMapEncodeTiled");
#endif
  if (found == nullptr) throw std::runtime_error("CUDA: this driver has no cuTensorMapEncodeTiled");
  ptx::TensorMap map{};
  const cuuint32_t every_element[4] = {1, 1, 1, 1};
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      &map.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(base), tensor.sizes, tensor.strides, tensor.box,
      every_element, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("CUDA: cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)));
  }
  return map;
}

#else

inline ptx::TensorMap tensor_map(const void* base, const TensorBoxes& tensor) {
  const auto& [sizes, strides, box] = tensor;
  return {base,
          2,
          {sizes[0], sizes[1], sizes[2], sizes[3]},
          {strides[0], strides[1], strides[2]},
          {box[0], box[1], box[2], box[3]}};
}

#endif

}  // namespace pagedtree::cuda
