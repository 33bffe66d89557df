// Checked arguments of one op, kept for the calls of another.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "torch/check.h"

namespace pagedtree::ops {

// Kept by number, which Torch passes much faster than tensors. Tensors, not addresses, so that the next call detects
// changes.
struct Prepared {
  virtual ~Prepared() = default;
};

// Tensors and the addresses of their elements. kWritten: a lazy clone (torch._lazy_clone) is materialised now.
template <bool kWritten>
class KeptTensors {
 public:
  explicit KeptTensors(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
    const auto note = [&](int64_t number) { return known_.push_back(number), true; };
    for (const Tensor& t : tensors_) each_number(t, note);
  }

  const std::vector<Tensor>& tensors() const { return tensors_; }

  bool are_unchanged() const {
    const int64_t* known = known_.data();
    const auto is_known = [&](int64_t number) { return *known++ == number; };
    return std::all_of(tensors_.begin(), tensors_.end(), [&](const Tensor& t) { return each_number(t, is_known); });
  }

 private:
  // Calls visit(number) while it returns true, the number of dimensions first. Tensor's methods would take three times
  // as long.
  template <typename Visit>
  static bool each_number(const Tensor& t, const Visit& visit) {
    int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
    int32_t dtype = 0;
    void* own = nullptr;
    const void* address = nullptr;
    if (aoti_torch_get_dim(t.get(), &dim) != AOTI_TORCH_SUCCESS ||
        aoti_torch_get_sizes(t.get(), &sizes) != AOTI_TORCH_SUCCESS ||
        aoti_torch_get_strides(t.get(), &strides) != AOTI_TORCH_SUCCESS ||
        aoti_torch_get_dtype(t.get(), &dtype) != AOTI_TORCH_SUCCESS ||
        (kWritten ? torch_get_mutable_data_ptr(t.get(), &own) : torch_get_const_data_ptr(t.get(), &address)) !=
            AOTI_TORCH_SUCCESS) {
      return false;
    }
    const auto place = static_cast<int64_t>(reinterpret_cast<uintptr_t>(kWritten ? own : address));
    if (!visit(dim) || !visit(dtype) || !visit(place)) return false;
    for (int64_t d = 0; d < dim; ++d) {
      if (!visit(sizes[d]) || !visit(strides[d])) return false;
    }
    return true;
  }
  std::vector<Tensor> tensors_;
  std::vector<int64_t> known_;
};

// Returns the number, which pagedtree_release_prepared(number) releases.
int64_t keep_prepared(std::shared_ptr<const Prepared> prepared);

// Returns null for an unknown number.
std::shared_ptr<const Prepared> find_prepared(int64_t number);

// Rejects a number that is no `Call`, by `name`.
template <typename Call>
std::shared_ptr<const Call> prepared(const Check& check, int64_t number, const char* name) {
  auto call = std::dynamic_pointer_cast<const Call>(find_prepared(number));
  check.that(call != nullptr, name, "what its op has prepared", number);
  return call;
}

}  // namespace pagedtree::ops
