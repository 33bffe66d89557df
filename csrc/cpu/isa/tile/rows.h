// Rows of any width from and to fp32, with no access beyond the row.
#pragma once

#include "cpu/isa/tile/convert.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

template <DType kType>
static inline vfloat load_lanes(const char* from, int64_t count) {
  if (count >= kLanes) return load_float<kType>(from);
  char buffer[kLanes * element_size(kType)] = {};
  std::memcpy(buffer, from, static_cast<size_t>(count * element_size(kType)));
  return load_float<kType>(buffer);
}

template <DType kType>
static inline void store_lanes(char* to, int64_t count, vfloat value) {
  if (count >= kLanes) return store_float<kType>(to, value);
  char buffer[kLanes * element_size(kType)];
  store_float<kType>(buffer, value);
  std::memcpy(to, buffer, static_cast<size_t>(count * element_size(kType)));
}

// Pads with zeros to `padded`, a multiple of the vector length.
static inline void load_row(const void* from, DType dtype, int64_t count, float* to, int64_t padded) {
  with_dtype(dtype, [&]<DType kType>() {
    const char* row = static_cast<const char*>(from);
    for (int64_t d = 0; d < padded; d += kLanes) {
      store(to + d, d < count ? load_lanes<kType>(row + d * element_size(kType), count - d) : splat(0.0f));
    }
  });
}

// May read the padding of `from`.
static inline void store_row(const float* from, DType dtype, int64_t count, void* to) {
  with_dtype(dtype, [&]<DType kType>() {
    if constexpr (kType != DType::kFloat8E4M3) {
      char* row = static_cast<char*>(to);
      for (int64_t d = 0; d < count; d += kLanes) {
        store_lanes<kType>(row + d * element_size(kType), count - d, load(from + d));
      }
    }
  });
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
