// Division by a number known before the kernel launch; GPUs have no divide instruction.
// quotient(v) = (v * ceil(2^(31 + bits) / divisor)) >> (31 + bits), with 2^bits the first power of two >= divisor
#pragma once

#include <bit>

#include "core/common.h"

namespace pagedtree {

// Exact for values of 31 bits with a factor of 32 bits (Granlund and Montgomery, PLDI 1994).
class SmallDivisor {
 public:
  constexpr SmallDivisor() : SmallDivisor(1) {}
  constexpr explicit SmallDivisor(int64_t divisor)
      : divisor_(static_cast<uint32_t>(clamp_to<int64_t>(divisor, 1, INT32_MAX))),
        bits_(std::bit_width(divisor_ - 1)),
        factor_(static_cast<uint32_t>(((uint64_t{1} << (31 + bits_)) + divisor_ - 1) / divisor_)) {}

  PT_HOST_DEVICE uint32_t quotient(uint32_t value) const {
    return static_cast<uint32_t>(uint64_t{2 * value} * factor_ >> 32) >> bits_;
  }
  PT_HOST_DEVICE uint32_t remainder(uint32_t value) const { return value - quotient(value) * divisor_; }

 private:
  uint32_t divisor_;
  int bits_;
  uint32_t factor_;
};

}  // namespace pagedtree
