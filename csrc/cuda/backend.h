// The CUDA backend, under its own name or as simt; it launches its kernels on the stream of the context. Rules are in
// rules.cu, the other ops in the files of their families.
#pragma once

#include "core/ops.h"

namespace pagedtree::cuda {

// As many rows are worked on at a time as large GPUs have SMs, so that memory does not grow with the batch.
constexpr int64_t kMaxOptionRows = 144;

class CudaBackend final : public Backend {
 public:
  constexpr explicit CudaBackend(const char* of_backend)
      : Backend(of_backend, {.recurrent_float32 = false, .cache_alignment = 16}, kMaxOptionRows) {}

  PT_OVERRIDES
};

}  // namespace pagedtree::cuda
