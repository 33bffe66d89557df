// Selects the backend of a call, with Torch's threads and streams.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>

#include "core/ops.h"
#include "torch/check.h"

namespace pagedtree::ops {

// `anchor`'s device is current during its lifetime.
struct CallContext : ExecContext {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
};
CallContext context_for(const Tensor& anchor);

// Throws if this build has no backend for `anchor`'s device.
const Backend& backend_for(const Tensor& anchor);

// Throws if out of memory.
Tensor empty_on(const Tensor& anchor, std::initializer_list<int64_t> shape, ScalarType dtype);

template <typename T>
Tensor made(const Tensor& anchor, std::initializer_list<int64_t> shape, T*& place) {
  Tensor t = empty_on(anchor, shape, dtype_of<T>());
  place = mutable_pointer<T>(t);
  return t;
}

}  // namespace pagedtree::ops
