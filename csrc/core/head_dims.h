// Supported head sizes, for checks, messages, Python (pagedtree._C.HEAD_DIMS) and the CUDA kernels, which do not
// compile without a tile for each (cuda/attention/config.h).
#pragma once

#include <cstdint>

namespace pagedtree {

// Columns of K and V.
struct HeadDims {
  int32_t k, v;
};

constexpr HeadDims kHeadDims[] = {{16, 16},   {32, 32},   {64, 64},   {96, 96},   {128, 128},
                                  {192, 192}, {256, 256}, {512, 512}, {192, 128}, {576, 512}};

}  // namespace pagedtree
