// Instructions without a C++ name, one function each. simt has them in C++: the kernels' source runs on the CPU.
#pragma once

#if defined(__CUDACC__)
#include "cuda/tile/ptx_cuda.cuh"

namespace pagedtree::ptx {
// cluster_sync() as a function: it has 40 instructions, and some kernels call it 30 times.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline __device__ __attribute__((noinline)) void meet_cluster() { cluster_sync(); }
#else
__device__ __forceinline__ void meet_cluster() { cluster_sync(); }
#endif
}  // namespace pagedtree::ptx
#else
#include "simt/ptx_simt.h"
#endif
