// Hopper's instructions (sm_90a): mbarrier, TMA, wgmma.
#pragma once

#include "cuda/tile/ptx.cuh"

#if defined(__CUDACC__)
#include "cuda/tile/ptx_sm90_cuda.cuh"
#else
#include "simt/ptx_sm90_simt.h"
#endif
