// Division by a divisor known at launch: the compiler's 64-bit division is a call of some hundred instructions.
#pragma once

#include <cstdint>

#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

// quotient = (value * factor) >> (63 + bits), where 2^bits is the first power of two not below the divisor and factor =
// ceil(2^(63 + bits) / divisor). Exact for values below 2^63 (Granlund and Montgomery, PLDI 1994).
class Divisor {
 public:
  Divisor() = default;  // uninitialized
  explicit Divisor(int64_t divisor) : divisor_(max_of<int64_t>(divisor, 1)) {
    int bits = 0;
    while (bits < 63 && (int64_t{1} << bits) < divisor_) ++bits;
    shift_ = bits - 1;
    __extension__ typedef unsigned __int128 Wide;
    const Wide numerator = static_cast<Wide>(1) << (63 + bits);
    factor_ = static_cast<uint64_t>((numerator + static_cast<Wide>(divisor_ - 1)) / static_cast<Wide>(divisor_));
  }

  // Returns value / divisor for value >= 0.
  __device__ __forceinline__ int64_t quotient(int64_t value) const {
    if (divisor_ == 1) return value;
    return static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(value), factor_) >> shift_);
  }
  __device__ __forceinline__ int64_t remainder(int64_t value, int64_t quotient) const {
    return value - quotient * divisor_;
  }

 private:
  int64_t divisor_;
  uint64_t factor_;
  int shift_;
};

}  // namespace pagedtree::cuda
