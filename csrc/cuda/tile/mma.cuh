// Loads the operands of mma.m16n8k16, 16-bit or e4m3, from shared memory. quad = lane / 4, pair = lane % 4. e4m3 uses
// the same ldmatrix: one 16-bit element is a pair of neighbouring codes. This permutes 16 columns. In K they are terms
// of a dot product, and Q has the same permutation. In V they are output columns (accumulator_columns()).
#pragma once

#include "cuda/tile/swizzle.cuh"

namespace pagedtree::cuda {

struct Float8E4M3 {
  uint8_t code;
};

template <typename Kv>
constexpr bool kIsFloat8 = sizeof(Kv) == 1;

template <typename T>
constexpr bool kIsBFloat16 = std::is_same_v<T, __nv_bfloat16>;

// __builtin_bit_cast that also accepts CUDA's half types.
template <typename To, typename From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof(to));
  return to;
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (kIsBFloat16<T>) {
    return bits_as<uint32_t>(__floats2bfloat162_rn(low, high));
  } else {
    return bits_as<uint32_t>(__floats2half2_rn(low, high));
  }
}

// ---- e4m3

// Operand type of the product. e4m3 becomes half, which is exact; not every GPU converts e4m3 to bfloat16.
template <typename T, typename Kv>
using Multiplied = std::conditional_t<kIsFloat8<Kv>, __half, T>;

// Before sm_89: shifting a code's bits into a half gives 1 / 256 of its value. Scores and outputs are rescaled.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kConvertsFloat8 = false;
#else
constexpr bool kConvertsFloat8 = true;
#endif
template <typename Kv>
constexpr float kDecodedScale = kIsFloat8<Kv> && !kConvertsFloat8 ? 256.0f : 1.0f;

// Converts the high bytes of both halves of `codes` to 1 / 256 of their values. NaN becomes +-480 / 256.
__device__ __forceinline__ uint32_t move_e4m3(uint32_t codes) {
  return (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 1);
}

// Converts bytes {0, 1} and {2, 3} to pairs of halves.
__device__ __forceinline__ uint2 decode_neighbours(uint32_t codes) {
  if constexpr (kConvertsFloat8) {
    return make_uint2(ptx::half2_from_e4m3(codes), ptx::half2_from_e4m3(codes >> 16));
  } else {
    return make_uint2(move_e4m3(__byte_perm(codes, 0, 0x1404)), move_e4m3(__byte_perm(codes, 0, 0x3424)));
  }
}

// Converts bytes {0, 2} and {1, 3}.
__device__ __forceinline__ uint2 decode_alternates(uint32_t codes) {
  if constexpr (kConvertsFloat8) return decode_neighbours(__byte_perm(codes, 0, 0x3120));
  return make_uint2(move_e4m3(codes << 8), move_e4m3(codes));
}

// ---- Q: 16 rows, 16 columns

template <typename Rows>
__device__ __forceinline__ void load_q(uint32_t (&a)[4], uint32_t base, uint32_t lane, uint32_t row, uint32_t column) {
  ptx::ldmatrix_x4(a, base + Rows::offset(row + lane % 16, column / 8 + lane / 16));
}

// Stores the 8 columns of `chunk` in load_q()'s order for a K of type Kv.
template <typename Rows, typename Kv>
__device__ __forceinline__ void store_q(unsigned char* q, uint32_t row, uint32_t chunk, uint4 values) {
  if constexpr (kIsFloat8<Kv>) {
    const uint32_t half = chunk % 2 * 8;
    *reinterpret_cast<uint2*>(q + Rows::offset(row, chunk & ~1u) + half) = make_uint2(values.x, values.z);
    *reinterpret_cast<uint2*>(q + Rows::offset(row, chunk | 1) + half) = make_uint2(values.y, values.w);
  } else {
    *reinterpret_cast<uint4*>(q + Rows::offset(row, chunk)) = values;
  }
}

// ---- K: 16 keys, 32 columns

struct KeyFragments {
  uint32_t b[2][2][2];  // [step of 16 columns][step of 8 keys][register]
};

template <typename Kv, typename Rows>
__device__ __forceinline__ KeyFragments load_k(uint32_t base, uint32_t lane, uint32_t key, uint32_t column) {
  const uint32_t row = key + lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
  KeyFragments k;
  uint32_t r[4];
  if constexpr (kIsFloat8<Kv>) {
    ptx::ldmatrix_x4(r, base + Rows::offset(row, column / 16 + chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 pairs = decode_neighbours(r[i]);
      k.b[i % 2][i / 2][0] = pairs.x;
      k.b[i % 2][i / 2][1] = pairs.y;
    }
  } else {
#pragma unroll
    for (uint32_t step = 0; step < 2; ++step) {
      ptx::ldmatrix_x4(r, base + Rows::offset(row, column / 8 + step * 2 + chunk));
#pragma unroll
      for (int i = 0; i < 4; ++i) k.b[step][i / 2][i % 2] = r[i];
    }
  }
  return k;
}

// ---- V: 16 keys, 32 columns

struct ValueFragments {
  uint32_t b[4][2];  // [step of 8 columns][register]
};

template <typename Kv, typename Rows>
__device__ __forceinline__ ValueFragments load_v(uint32_t base, uint32_t lane, uint32_t key, uint32_t column) {
  const uint32_t row = key + lane % 16, chunk = lane / 16;
  ValueFragments v;
  uint32_t r[4];
  if constexpr (kIsFloat8<Kv>) {
    ptx::ldmatrix_x4_trans(r, base + Rows::offset(row, column / 16 + chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 columns = decode_alternates(r[i]);
      v.b[i / 2 * 2][i % 2] = columns.x;
      v.b[i / 2 * 2 + 1][i % 2] = columns.y;
    }
  } else {
#pragma unroll
    for (uint32_t step = 0; step < 2; ++step) {
      ptx::ldmatrix_x4_trans(r, base + Rows::offset(row, column / 8 + step * 2 + chunk));
#pragma unroll
      for (int i = 0; i < 4; ++i) v.b[step * 2 + i / 2][i % 2] = r[i];
    }
  }
  return v;
}

// Returns pair `i` (0 or 1) of the lane's output columns {first, first + 1} in row quad + 8 * half, of 16 columns.
struct ColumnPair {
  uint32_t first;
  float values[2];
};

template <typename Kv>
__device__ __forceinline__ ColumnPair accumulator_columns(const float (&even)[4], const float (&odd)[4], uint32_t lane,
                                                          uint32_t half, uint32_t i) {
  const uint32_t pair = lane % 4;
  if constexpr (kIsFloat8<Kv>) {
    return {pair * 4 + i * 2, {even[half * 2 + i], odd[half * 2 + i]}};
  } else {
    const float (&tile)[4] = i == 0 ? even : odd;
    return {i * 8 + pair * 2, {tile[half * 2], tile[half * 2 + 1]}};
  }
}

}  // namespace pagedtree::cuda
