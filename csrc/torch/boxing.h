// Adapts host functions to the dispatcher: TORCH_BOX with strings that are freed.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace pagedtree::ops {

// Returns the text of a str argument, whose handle the callee owns. Torch's conversion to std::string frees the handle,
// but never the copy that it makes.
inline std::string consume_string(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  const bool known = torch_string_length(handle, &length) == AOTI_TORCH_SUCCESS &&
                     torch_string_c_str(handle, &data) == AOTI_TORCH_SUCCESS;
  const std::string text(known ? data : "", known ? length : 0);
  torch_delete_string(handle);
  if (!known) throw std::runtime_error("torch does not give the text of a str argument");
  return text;
}

// The type as which Torch unpacks a parameter, and its conversion for the host function.
template <typename Parameter>
struct Unboxed {
  using Type = Parameter;
  static Parameter& take(std::remove_reference_t<Parameter>& value) { return value; }
};
template <>
struct Unboxed<const std::string&> {
  using Type = StringHandle;
  static std::string take(StringHandle handle) { return consume_string(handle); }
};
template <>
struct Unboxed<const std::optional<std::string>&> {
  using Type = std::optional<StringHandle>;
  static std::optional<std::string> take(const std::optional<StringHandle>& handle) {
    return handle.has_value() ? std::optional(consume_string(*handle)) : std::nullopt;
  }
};

template <auto kHost>
struct Boxed;
template <typename Result, typename... Parameters, Result (*kHost)(Parameters...)>
struct Boxed<kHost> {
  static_assert(!((std::is_same_v<Parameters, std::string> || ...) ||
                  (std::is_same_v<Parameters, std::optional<std::string>> || ...)),
                "take a string by const reference");
  static Result call(typename Unboxed<Parameters>::Type... arguments) {
    return kHost(Unboxed<Parameters>::take(arguments)...);
  }
};

}  // namespace pagedtree::ops

#define PT_BOX(host) TORCH_BOX((&::pagedtree::ops::Boxed<host>::call))
