// Which backend a call goes to, and how it shares Torch's threads and streams.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <string>

#include "core/ops.h"
#include "torch/check.h"

namespace pagedtree::ops {

// How a call on `anchor`'s device runs; while it lives, that device is the current one.
struct CallContext : ExecContext {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
};
CallContext context_for(const Tensor& anchor);

// The backend for tensors on `anchor`'s device; throws where this build has none.
const Backend& backend_for(const Tensor& anchor);

// A new tensor on `anchor`'s device; throws where there is no memory for it.
Tensor empty_on(const Tensor& anchor, std::initializer_list<int64_t> shape, ScalarType dtype);

// The same for elements of T, which are written to `place`.
template <typename T>
Tensor made(const Tensor& anchor, std::initializer_list<int64_t> shape, T*& place) {
  Tensor t = empty_on(anchor, shape, dtype_of<T>());
  place = mutable_pointer<T>(t);
  return t;
}

}  // namespace pagedtree::ops
