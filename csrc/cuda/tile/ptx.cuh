// The instructions that C++ has no name for, one function each. There are two implementations: PTX for the GPU, and for
// the host the meaning of it, so that the simt backend runs the kernels' own source on the CPU.
#pragma once

#if defined(__CUDACC__)
#include "cuda/tile/ptx_cuda.cuh"
#else
#include "simt/ptx_simt.h"
#endif
