// Rotary embedding of a token's heads.
// (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)
#include "cpu/isa.h"
#include "cpu/isa/tile/rows.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

// Keeps subnormals, which the bf16 instruction stores as zeros.
template <DType kType>
inline void store_exact(char* to, int64_t count, vfloat value) {
  if constexpr (kType == DType::kBFloat16) {
    const vhalf half = __builtin_convertvector(bfloat16_from_float(value), vhalf);
    if (count >= kLanes) {
      std::memcpy(to, &half, sizeof(half));
    } else {
      std::memcpy(to, &half, static_cast<size_t>(count) * sizeof(uint16_t));
    }
  } else {
    store_lanes<kType>(to, count, value);
  }
}

struct Pairs {
  vfloat first, second;
};

template <DType kType>
inline Pairs load_halves(const char* row, int64_t half, int64_t count) {
  return {load_lanes<kType>(row, count), load_lanes<kType>(row + half * element_size(kType), count)};
}

template <DType kType>
inline void store_halves(char* row, int64_t half, int64_t count, const Pairs& pairs) {
  store_exact<kType>(row, count, pairs.first);
  store_exact<kType>(row + half * element_size(kType), count, pairs.second);
}

template <DType kType>
inline Pairs load_neighbours(const char* row, int64_t count) {
  const vfloat low = load_lanes<kType>(row, 2 * count);
  const int64_t behind = 2 * count - kLanes;
  const vfloat high = behind > 0 ? load_lanes<kType>(row + kLanes * element_size(kType), behind) : splat(0.0f);
  const vint even = lane_index() * 2;
  return {__builtin_shuffle(low, high, even), __builtin_shuffle(low, high, even + 1)};
}

template <DType kType>
inline void store_neighbours(char* row, int64_t count, const Pairs& pairs) {
  const vint from = lane_index() / 2 + (lane_index() & 1) * kLanes;
  store_exact<kType>(row, 2 * count, __builtin_shuffle(pairs.first, pairs.second, from));
  const int64_t behind = 2 * count - kLanes;
  if (behind <= 0) return;
  store_exact<kType>(row + kLanes * element_size(kType), behind,
                     __builtin_shuffle(pairs.first, pairs.second, from + kLanes / 2));
}

template <DType kType, DType kAngleType>
void rotate(const RopeAppendParams& p, int64_t angles, const RotaryHeads& heads) {
  constexpr int64_t kSize = element_size(kType), kAngleSize = element_size(kAngleType);
  const int64_t half = p.rotary_dim / 2, start = p.rotary_start * kSize;
  const char* cosines = static_cast<const char*>(p.cos_sin) + angles * p.cos_sin_stride * kAngleSize;
  const char* sines = cosines + half * kAngleSize;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = min_of<int64_t>(half - i, kLanes);
    const vfloat cos = load_lanes<kAngleType>(cosines + i * kAngleSize, count);
    const vfloat sin = load_lanes<kAngleType>(sines + i * kAngleSize, count);
    const int64_t at = start + (p.interleaved ? 2 * i : i) * kSize;
    for (int64_t h = 0; h < heads.num_heads; ++h) {
      const char* from = heads.from + h * heads.from_stride + at;
      char* to = heads.to + h * heads.to_stride + at;
      const Pairs x = p.interleaved ? load_neighbours<kType>(from, count) : load_halves<kType>(from, half, count);
      const Pairs y = {x.first * cos - x.second * sin, x.second * cos + x.first * sin};
      if (p.interleaved) {
        store_neighbours<kType>(to, count, y);
      } else {
        store_halves<kType>(to, half, count, y);
      }
    }
  }
}

void copy_columns(const RotaryHeads& heads, int64_t size, int64_t begin, int64_t end) {
  if (begin >= end || heads.from == heads.to) return;
  for (int64_t h = 0; h < heads.num_heads; ++h) {
    std::memcpy(heads.to + h * heads.to_stride + begin * size, heads.from + h * heads.from_stride + begin * size,
                static_cast<size_t>((end - begin) * size));
  }
}

}  // namespace

void rotate_heads(const RopeAppendParams& p, int64_t angles, const RotaryHeads& heads) {
  const int64_t size = element_size(p.append.dtype);
  copy_columns(heads, size, 0, p.rotary_start);
  copy_columns(heads, size, p.rotary_start + p.rotary_dim, p.head_dim);
  with_dtype(p.append.dtype, [&]<DType kType>() {
    if constexpr (kType != DType::kFloat8E4M3) {
      if (p.cos_sin_dtype == kType) {
        rotate<kType, kType>(p, angles, heads);
      } else {
        rotate<kType, DType::kFloat32>(p, angles, heads);
      }
    }
  });
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
