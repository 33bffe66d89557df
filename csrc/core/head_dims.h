// The head sizes that attention takes. All that depends on them reads this table: checks and their messages, Python
// (pagedtree._C.HEAD_DIMS), and the CUDA kernels, which do not compile if one has no tile (cuda/attention/config.h).
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
