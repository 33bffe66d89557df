// Argument checks. A failed check names op, argument, expectation and value before anything is written; Python raises
// ValueError.
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
#include <utility>
#include <vector>

#include "core/params.h"

namespace pagedtree::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum class Strides { kContiguous, kLastContiguous, kAny };

constexpr int64_t kAnySize = -1;

struct Axis {
  int64_t size;
  const char* name;

  Axis(const char* of_name, int64_t of_size = kAnySize) : size(of_size), name(of_name) {}  // NOLINT: implicit
};

// Returns the name in Python.
inline std::string dtype_text(ScalarType dtype) {
  using enum ScalarType;
  static constexpr std::pair<ScalarType, const char*> kNames[] = {{Float, "float32"},
                                                                  {Half, "float16"},
                                                                  {Double, "float64"},
                                                                  {Int, "int32"},
                                                                  {Long, "int64"},
                                                                  {Short, "int16"},
                                                                  {Char, "int8"},
                                                                  {Byte, "uint8"},
                                                                  {ComplexHalf, "complex32"},
                                                                  {ComplexFloat, "complex64"},
                                                                  {ComplexDouble, "complex128"}};
  std::string text = torch::headeronly::toString(dtype);  // "BFloat16", "Bool", "Float8_e4m3fn"
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  for (const auto& [named, name] : kNames) text = named == dtype ? name : text;
  return "torch." + text;
}

// 0 if a struct is not whole 64-bit words.
template <typename T>
constexpr int64_t kWordsOf = sizeof(T) % sizeof(int64_t) == 0 ? sizeof(T) / sizeof(int64_t) : 0;

// Structs are int64 words; bools are read as bytes, which may hold more than 0 and 1.
template <typename T>
constexpr ScalarType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return ScalarType::Float;
  if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, uint8_t>) return ScalarType::Bool;
  if constexpr (std::is_same_v<T, int32_t> || std::is_same_v<T, uint32_t>) return ScalarType::Int;
  static_assert(sizeof(T) == 1 || sizeof(T) == 4 || kWordsOf<T> > 0);
  return ScalarType::Long;
}

template <typename T>
const T* const_pointer(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
T* mutable_pointer(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

inline void set_strides(const Tensor& t, int64_t& first, int64_t& second) {
  first = t.stride(0);
  second = t.stride(1);
}

// For pointers whose null means "not given": a tensor without elements gets an address that is never read.
template <typename T>
const T* given_pointer(const Tensor& t) {
  static constexpr T kNoElements[1]{};
  return t.numel() == 0 ? kNoElements : const_pointer<T>(t);
}

template <typename T>
const T* optional_pointer(const OptionalTensor& t) {
  return t.has_value() ? given_pointer<T>(*t) : nullptr;
}

// Checks of values synchronise. Read at each call.
inline bool value_checks_enabled() {
  const char* flag = std::getenv("PAGEDTREE_CHECK");
  return flag != nullptr && *flag != '\0' && std::string(flag) != "0";
}

class Check {
 public:
  // All tensors of the call must be on `anchor`'s device.
  Check(const char* op, const Tensor& anchor) : op_(op), device_(device_of(anchor)) {}

  template <typename Got>
  [[noreturn]] void fail(std::string_view name, std::string_view expected, const Got& got) const {
    std::string message = op_;
    message.append(": ").append(name).append(": expected ").append(expected).append(", got ").append(text_of(got));
    throw std::runtime_error(message);
  }

  template <typename Got>
  void that(bool condition, std::string_view name, std::string_view expected, const Got& got) const {
    if (!condition) fail(name, expected, got);
  }

  // Returns the value as params have it.
  int32_t in(int64_t value, std::string_view name, int64_t low, int64_t high) const {
    if (value < low || value > high) fail(name, std::to_string(low) + ".." + std::to_string(high), value);
    return static_cast<int32_t>(value);
  }

  void tensor(const Tensor& t, std::string_view name, std::initializer_list<ScalarType> dtypes,
              std::initializer_list<Axis> shape, Strides strides = Strides::kContiguous) const {
    dtype(t, name, dtypes);
    device(t, name);
    bool same = t.dim() == static_cast<int64_t>(shape.size());
    size_t i = 0;
    for (const Axis& axis : shape) {
      same = same && (axis.size == kAnySize || t.size(static_cast<int64_t>(i)) == axis.size);
      ++i;
    }
    if (!same) fail(name, "shape " + text(shape), text(t.sizes()));
    if (strides == Strides::kContiguous && !t.is_contiguous()) fail(name, "contiguous", "strides " + text(t.strides()));
    const int64_t last = t.dim() - 1;
    if (strides == Strides::kLastContiguous && t.numel() > 0 && last >= 0 && t.size(last) > 1 && t.stride(last) != 1) {
      fail(name, "contiguous in its last dimension", "strides " + text(t.strides()));
    }
    memory(t, name);
  }

  // Returns the elements, null if an optional tensor is not given.
  template <typename T>
  const T* read(const Tensor& t, std::string_view name, std::initializer_list<Axis> shape,
                Strides strides = Strides::kContiguous) const {
    tensor(t, name, {dtype_of<T>()}, shape, strides);
    return const_pointer<T>(t);
  }
  template <typename T>
  const T* read(const OptionalTensor& t, std::string_view name, std::initializer_list<Axis> shape,
                Strides strides = Strides::kContiguous) const {
    if (t.has_value()) tensor(*t, name, {dtype_of<T>()}, shape, strides);
    return optional_pointer<T>(t);
  }

  // Checks a cache [pages, page_size, Hkv, D].
  template <typename Fits>
  void heads(const Tensor& cache, std::string_view name, const std::string& expected, const Fits& fits) const {
    if (cache.dim() != 4 || fits(cache.size(2))) return;
    const bool turned = fits(cache.size(1));
    fail(name, expected + " in its third dimension (pages, page_size, Hkv, D)",
         text(cache.sizes()) + (turned ? "; of a cache [pages, Hkv, page_size, D] pass cache.transpose(1, 2)" : ""));
  }

  // Rejects storage that was freed (resize_(0)), or begins at a misaligned address (a buffer from a file), which
  // neither compiler nor GPU may load from.
  void memory(const Tensor& t, std::string_view name) const {
    int64_t stored = 0;
    if (aoti_torch_get_storage_size(t.get(), &stored) == AOTI_TORCH_SUCCESS && stored == 0 && t.numel() > 0) {
      fail(name, "a tensor with memory", "one whose storage has been freed");
    }
    const auto bytes = static_cast<uintptr_t>(t.element_size());
    const uintptr_t excess = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes;
    if (excess == 0) return;
    fail(name, "an address that is a multiple of its elements' " + std::to_string(bytes) + " bytes",
         "one that is " + std::to_string(excess) + " more");
  }

  void dtype(const Tensor& t, std::string_view name, std::initializer_list<ScalarType> dtypes) const {
    if (!t.defined()) fail(name, "a Tensor", "None");
    // A dtype converts faster to Torch's number than the number to a dtype.
    using torch::stable::detail::from, torch::stable::detail::to;
    int32_t number = 0;
    const bool known = aoti_torch_get_dtype(t.get(), &number) == AOTI_TORCH_SUCCESS;
    std::string expected;
    for (ScalarType d : dtypes) {
      if (known && to<int32_t>(from(d)) == number) return;
      expected += (expected.empty() ? "" : " or ") + dtype_text(d);
    }
    fail(name, "dtype " + expected, dtype_text(t.scalar_type()));
  }

  void device(const Tensor& t, std::string_view name) const {
    if (device_of(t) != device_) fail(name, "the device of the other arguments", "another device");
  }

  // Requires one value per sequence, or one for all. Call after tensor().
  void one_or(int64_t batch, const Tensor& t, std::string_view name) const {
    if (t.size(0) == 1 || t.size(0) == batch) return;
    fail(name, "shape [1] or [" + std::to_string(batch) + "]", text(t.sizes()));
  }

  // Checks int32 [B + 1], with the pointer in `place`. Returns B.
  int64_t offsets(const Tensor& t, std::string_view name, const int32_t*& place) const {
    place = read<int32_t>(t, name, {"B + 1"});
    that(t.size(0) >= 1, name, "shape [B + 1]", text(t.sizes()));
    return t.size(0) - 1;
  }

  template <typename Sizes>
  static std::string text(const Sizes& sizes) {
    std::string out;
    for (const int64_t size : sizes) out += (out.empty() ? "" : ", ") + std::to_string(size);
    return "[" + out + "]";
  }

  // "[2, *] (B, max_pages)"
  static std::string text(std::initializer_list<Axis> shape) {
    std::string sizes, names;
    for (const Axis& axis : shape) {
      sizes += (sizes.empty() ? "" : ", ") + (axis.size == kAnySize ? "*" : std::to_string(axis.size));
      names += std::string(names.empty() ? "" : ", ") + axis.name;
    }
    return "[" + sizes + "]" + (names.empty() ? "" : " (" + names + ")");
  }

 private:
  // Streams use their locale's facets, which two C++ libraries in a process (a static one here, Torch's) may mix up and
  // crash.
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

  // Allows None, an undefined tensor in the stable ABI; tensor() rejects it by name.
  static std::pair<int32_t, int32_t> device_of(const Tensor& t) {
    std::pair<int32_t, int32_t> device{};
    if (t.defined()) {
      aoti_torch_get_device_type(t.get(), &device.first);
      aoti_torch_get_device_index(t.get(), &device.second);
    }
    return device;
  }

  const char* op_;
  std::pair<int32_t, int32_t> device_;  // type and index in Torch's numbers
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

// Checks int32 or int64 [size].
inline Integers integers(const Check& check, const Tensor& t, std::string_view name, Axis size) {
  check.tensor(t, name, {ScalarType::Int, ScalarType::Long}, {size});
  return {given_pointer<int64_t>(t), t.scalar_type() == ScalarType::Long};
}

// Checks int32 [batch, max_pages].
inline PageTable page_table_of(const Check& check, const Tensor& t, int64_t batch, int64_t page_size) {
  const auto* pages = check.read<int32_t>(t, "page_table", {{"B", batch}, "max_pages"}, Strides::kLastContiguous);
  return {pages, t.stride(0), t.size(1), page_size};
}

}  // namespace pagedtree::ops
