// The instructions that C++ has no name for, one function each. There are two implementations: PTX for the GPU, and for
// the host the meaning of it, so that the simt backend runs the kernels' own source on the CPU.
#pragma once

#if defined(__CUDACC__)
#include "cuda/tile/ptx_cuda.cuh"

namespace pagedtree::ptx {
// cluster_sync(), of which clusters need one copy: it has 40 instructions, and some kernels have 30 of them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline __device__ __attribute__((noinline)) void meet_cluster() { cluster_sync(); }
#else
__device__ __forceinline__ void meet_cluster() { cluster_sync(); }
#endif
}  // namespace pagedtree::ptx
#else
#include "simt/ptx_simt.h"
#endif
