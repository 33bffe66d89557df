// Operands of mma.m16n8k16 out of shared memory, 16-bit or e4m3. A lane has quad = lane / 4 and pair = lane % 4.
//
// e4m3 rows are read with the same instructions: what ldmatrix takes for one 16-bit element are two neighbours. So
// within 16 columns the order is another one. For K it is the order of the dot product's terms, and Q is stored in the
// same; for V it is the order of the output's columns, see accumulator_columns().
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

// As __builtin_bit_cast, also for CUDA's half types.
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

// Two e4m3 codes in the high bytes of the two halves of `codes`, as T. Shifted to T's exponent and mantissa a code is
// its value times a power of two, subnormals too; NaN codes become +-480.
template <typename T>
__device__ __forceinline__ uint32_t from_e4m3(uint32_t codes) {
  constexpr int kShift = kIsBFloat16<T> ? 4 : 1;
  const uint32_t bits = (codes & 0x80008000u) | ((codes & 0x7f007f00u) >> kShift);
  if constexpr (kIsBFloat16<T>) {
    const __nv_bfloat162 scale = bits_as<__nv_bfloat162>(0x7b807b80u);  // 2^120
    return bits_as<uint32_t>(__hmul2(bits_as<__nv_bfloat162>(bits), scale));
  } else {
    const __half2 scale = bits_as<__half2>(0x5c005c00u);  // 2^8
    return bits_as<uint32_t>(__hmul2(bits_as<__half2>(bits), scale));
  }
}

// Bytes i and j of `codes` as a pair of T.
template <typename T, int i, int j>
__device__ __forceinline__ uint32_t convert_bytes(uint32_t codes) {
  return from_e4m3<T>(__byte_perm(codes, 0, 0x0404 | i << 4 | j << 12));
}

// ---- Q: 16 rows, 16 columns

template <typename Rows>
__device__ __forceinline__ void load_q(uint32_t (&a)[4], uint32_t base, uint32_t lane, uint32_t row, uint32_t column) {
  ptx::ldmatrix_x4(a, base + Rows::offset(row + lane % 16, column / 8 + lane / 16));
}

// The 8 columns of chunk `chunk` go where load_q() expects them for a K of type Kv.
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

template <typename T, typename Kv, typename Rows>
__device__ __forceinline__ KeyFragments load_k(uint32_t base, uint32_t lane, uint32_t key, uint32_t column) {
  const uint32_t row = key + lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
  KeyFragments k;
  uint32_t r[4];
  if constexpr (kIsFloat8<Kv>) {
    ptx::ldmatrix_x4(r, base + Rows::offset(row, column / 16 + chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      k.b[i % 2][i / 2][0] = convert_bytes<T, 0, 1>(r[i]);
      k.b[i % 2][i / 2][1] = convert_bytes<T, 2, 3>(r[i]);
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

template <typename T, typename Kv, typename Rows>
__device__ __forceinline__ ValueFragments load_v(uint32_t base, uint32_t lane, uint32_t key, uint32_t column) {
  const uint32_t row = key + lane % 16, chunk = lane / 16;
  ValueFragments v;
  uint32_t r[4];
  if constexpr (kIsFloat8<Kv>) {
    ptx::ldmatrix_x4_trans(r, base + Rows::offset(row, column / 16 + chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v.b[i / 2 * 2][i % 2] = convert_bytes<T, 0, 2>(r[i]);
      v.b[i / 2 * 2 + 1][i % 2] = convert_bytes<T, 1, 3>(r[i]);
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

// Of 16 columns of the output, in two accumulators: the lane's neighbouring columns {first, first + 1} number
// `i` (0 or 1) of accumulator row `half` (quad + 8 * half).
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
