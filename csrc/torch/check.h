// Argument checks of the torch layer. A refusal names the op, the argument, what was expected and what came, before
// anything is written; Python turns it into ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/params.h"

namespace pagedtree::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum class Strides { kContiguous, kLastContiguous, kAny };

constexpr int64_t kAnySize = -1;

// PAGEDTREE_CHECK=1: values in tensors are checked too, which synchronises. Read at each call.
inline bool value_checks_enabled() {
  const char* flag = std::getenv("PAGEDTREE_CHECK");
  return flag != nullptr && *flag != '\0' && std::string(flag) != "0";
}

class Check {
 public:
  // Every tensor of the call must live where `anchor` lives.
  Check(const char* op, const Tensor& anchor) : op_(op), device_(device_of(anchor)) {}

  template <typename Got>
  [[noreturn]] void fail(std::string_view name, std::string_view expected, const Got& got) const {
    std::string message = op_;
    message.append(": `").append(name).append("` must be ").append(expected).append(", got ").append(text_of(got));
    throw std::runtime_error(message);
  }

  template <typename Got>
  void that(bool condition, std::string_view name, std::string_view expected, const Got& got) const {
    if (!condition) fail(name, expected, got);
  }

  void tensor(const Tensor& t, std::string_view name, std::initializer_list<ScalarType> dtypes,
              std::initializer_list<int64_t> shape, Strides strides = Strides::kContiguous) const {
    dtype(t, name, dtypes);
    device(t, name);
    bool same = t.dim() == static_cast<int64_t>(shape.size());
    size_t i = 0;
    for (int64_t expected : shape) {
      same = same && (expected == kAnySize || t.size(static_cast<int64_t>(i)) == expected);
      ++i;
    }
    if (!same) fail(name, "of shape " + text(shape), text(t.sizes()));
    if (strides == Strides::kContiguous && !t.is_contiguous()) fail(name, "contiguous", "strides " + text(t.strides()));
    const int64_t last = t.dim() - 1;
    if (strides == Strides::kLastContiguous && t.numel() > 0 && last >= 0 && t.size(last) > 1 && t.stride(last) != 1) {
      fail(name, "contiguous in its last dimension", "strides " + text(t.strides()));
    }
    aligned(t, name);
  }

  // Tensors whose storage begins anywhere (a buffer that is read from a file, say) may lie between two elements, where
  // neither the compiler's loads nor the GPU's may read.
  void aligned(const Tensor& t, std::string_view name) const {
    const auto bytes = static_cast<uintptr_t>(t.element_size());
    const uintptr_t excess = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes;
    if (excess == 0) return;
    fail(name, "at an address that is a multiple of its elements' " + std::to_string(bytes) + " bytes",
         "one that is " + std::to_string(excess) + " more");
  }

  void dtype(const Tensor& t, std::string_view name, std::initializer_list<ScalarType> dtypes) const {
    if (!t.defined()) fail(name, "a Tensor", "None");
    std::string expected;
    for (ScalarType d : dtypes) {
      if (d == t.scalar_type()) return;
      expected += (expected.empty() ? "" : " or ") + std::string(torch::headeronly::toString(d));
    }
    fail(name, "of dtype " + expected, torch::headeronly::toString(t.scalar_type()));
  }

  void device(const Tensor& t, std::string_view name) const {
    if (!(t.device() == device_)) fail(name, "on the device of the other arguments", "another device");
  }

  // One value for each of the batch's sequences, or one for all; called after tensor().
  void one_or(int64_t batch, const Tensor& t, std::string_view name) const {
    if (t.size(0) == 1 || t.size(0) == batch) return;
    fail(name, "of shape [1] or [" + std::to_string(batch) + "]", text(t.sizes()));
  }

  // int32 offsets [B + 1] of a ragged batch; returns B.
  int64_t offsets(const Tensor& t, std::string_view name) const {
    tensor(t, name, {ScalarType::Int}, {kAnySize});
    that(t.size(0) >= 1, name, "of shape [B + 1]", text(t.sizes()));
    return t.size(0) - 1;
  }

  template <typename Sizes>
  static std::string text(const Sizes& sizes) {
    std::string out = "[";
    for (int64_t size : sizes)
      out += (out.size() > 1 ? ", " : "") + (size == kAnySize ? std::string("*") : std::to_string(size));
    return out + "]";
  }

 private:
  // A stream would write numbers by the facets of its locale. A process that has two C++ libraries, as with a
  // statically linked one here and torch's, may mix them up and end there.
  template <typename Got>
  static std::string text_of(const Got& got) {
    if constexpr (std::is_floating_point_v<Got>) {
      char digits[32];
      std::snprintf(digits, sizeof digits, "%g", static_cast<double>(got));
      return digits;
    } else if constexpr (std::is_integral_v<Got>) {
      return std::to_string(got);
    } else {
      return std::string(got);
    }
  }

  // None passes for an undefined tensor in the stable ABI; tensor() refuses it by name.
  static torch::stable::Device device_of(const Tensor& anchor) {
    return anchor.defined() ? anchor.device() : torch::stable::Device(torch::headeronly::DeviceType::CPU);
  }

  const char* op_;
  torch::stable::Device device_;
};

inline DType core_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat8E4M3;
  }
}

template <typename T>
const T* const_pointer(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
T* mutable_pointer(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// For pointers whose null means "not given": a tensor without elements has no memory and gets an address that nobody
// reads.
template <typename T>
const T* given_pointer(const Tensor& t) {
  static constexpr T kNoElements[1]{};
  return t.numel() == 0 ? kNoElements : const_pointer<T>(t);
}

template <typename T>
const T* optional_pointer(const std::optional<Tensor>& t) {
  return t.has_value() ? given_pointer<T>(*t) : nullptr;
}

inline PageTable page_table_of(const Tensor& t, int64_t page_size) {
  return {const_pointer<int32_t>(t), t.stride(0), t.size(1), page_size};
}

}  // namespace pagedtree::ops
