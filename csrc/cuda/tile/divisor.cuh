// Division by a number that the host knows before the launch: the GPU has no instruction for it, and for 64 bits the
// compiler calls a function of some hundred instructions.
#pragma once

#include <cstdint>

#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

// The quotient is (value * factor) >> (63 + bits), with 2^bits the first power of two not below the divisor and factor
// = 2^(63 + bits) / divisor, rounded up: exact for every value below 2^63 (Granlund and Montgomery, PLDI 1994).
class Divisor {
 public:
  Divisor() = default;  // of nothing yet
  explicit Divisor(int64_t divisor) : divisor_(max_of<int64_t>(divisor, 1)) {
    int bits = 0;
    while (bits < 63 && (int64_t{1} << bits) < divisor_) ++bits;
    shift_ = bits - 1;
    __extension__ typedef unsigned __int128 Wide;
    const Wide numerator = static_cast<Wide>(1) << (63 + bits);
    factor_ = static_cast<uint64_t>((numerator + static_cast<Wide>(divisor_ - 1)) / static_cast<Wide>(divisor_));
  }

  // value / divisor and value % divisor, of a value that is not negative.
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
