// The CUDA backend's functions, one for each entry of Backend: each launches its kernels on the stream of the context.
#pragma once

#include "core/backend.h"

namespace pagedtree::cuda {

void append_kv(const AppendKvParams& params, const ExecContext& ctx);

}  // namespace pagedtree::cuda
