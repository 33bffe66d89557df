// Which backend a call goes to, and how it shares Torch's threads and streams.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "core/ops.h"

namespace pagedtree::ops {

using torch::stable::Tensor;

// How a call on `anchor`'s device runs; while it lives, that device is the current one.
struct CallContext : ExecContext {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
};
CallContext context_for(const Tensor& anchor);

// The backend for tensors on `anchor`'s device; throws where this build has none.
const Backend& backend_for(const Tensor& anchor);

// A new tensor on `anchor`'s device; throws where there is no memory for it.
Tensor empty_on(const Tensor& anchor, std::initializer_list<int64_t> shape, torch::headeronly::ScalarType dtype);

}  // namespace pagedtree::ops
