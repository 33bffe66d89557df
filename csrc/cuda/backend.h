// The CUDA backend, also compiled as simt. Launches kernels on the context's stream.
#pragma once

#include "core/ops.h"

namespace pagedtree::cuda {

// Rows in flight: the SMs of large GPUs, so that scratch does not grow with the batch.
constexpr int64_t kMaxOptionRows = 144;

class CudaBackend final : public Backend {
 public:
  constexpr explicit CudaBackend(const char* of_backend)
      : Backend(of_backend, {.recurrent_float32 = false, .cache_alignment = 16}, kMaxOptionRows) {}

  PT_OVERRIDES
};

}  // namespace pagedtree::cuda
