// What an op has checked for later calls: their params, as the bytes of a tensor, which Torch owns.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "torch/ops.h"

namespace pagedtree::ops {

// Params of the calls that one op prepares and another one makes. Their pointers are those of tensors that whoever
// keeps the bytes must keep, too. kMark: bytes of another origin do not begin like this.
template <typename Params, uint64_t kMark>
class Prepared {
 public:
  // For calls on the device of `anchor`.
  static Tensor pack(const Tensor& anchor, const std::vector<Params>& calls) {
    const torch::stable::Device device = anchor.device(), host(torch::headeronly::DeviceType::CPU);
    const Head head{kMark, static_cast<int32_t>(device.type()), device.index()};
    const std::vector<int64_t> size{static_cast<int64_t>(sizeof(head) + calls.size() * sizeof(Params))};
    Tensor packed = torch::stable::empty(size, ScalarType::Byte, std::nullopt, host);
    auto* const bytes = mutable_pointer<uint8_t>(packed);
    std::memcpy(bytes, &head, sizeof(head));
    std::memcpy(bytes + sizeof(head), calls.data(), calls.size() * sizeof(Params));
    return packed;
  }

  // Refuses other tensors in the place of `name` than those of pack(), and an `anchor`, the argument of that name, on
  // another device.
  static std::vector<Params> unpack(const Check& check, const Tensor& packed, const char* name, const Tensor& anchor,
                                    const char* anchor_name) {
    Head head{};
    const int64_t size = packed.is_cpu() && packed.is_contiguous() ? packed.element_size() * packed.numel() : 0;
    const int64_t of_calls = size - static_cast<int64_t>(sizeof(head));
    if (of_calls > 0 && of_calls % static_cast<int64_t>(sizeof(Params)) == 0) {
      std::memcpy(&head, packed.const_data_ptr(), sizeof(head));
    }
    check.that(head.mark == kMark, name, "what its op has prepared", "another tensor");
    const torch::stable::Device device = anchor.device();
    if (static_cast<int32_t>(device.type()) != head.device_type || device.index() != head.device_index) {
      check.fail(anchor_name, "on the device of the other arguments", "another device");
    }
    std::vector<Params> calls(static_cast<size_t>(of_calls) / sizeof(Params));
    std::memcpy(calls.data(), const_pointer<uint8_t>(packed) + sizeof(head), static_cast<size_t>(of_calls));
    return calls;
  }

 private:
  struct Head {
    uint64_t mark;
    int32_t device_type, device_index;
  };
  static_assert(std::is_trivially_copyable_v<Params>);
};

}  // namespace pagedtree::ops
