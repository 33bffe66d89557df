// Instructions of cuda/tile/ptx.cuh on the machine.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "simt/device.h"

namespace pagedtree::ptx {

using simt::Location;

// ---- shared memory

template <typename T>
T& shared(Location at = Location::current()) {
  auto& m = simt::machine();
  if (sizeof(T) > m.shared_bytes()) m.fail({"shared", at}, "the launch asked for less shared memory");
  return *reinterpret_cast<T*>(m.shared_memory());
}

inline uint32_t smem_addr(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - simt::machine().shared_memory());
}

// ---- cp.async

inline void cp_async_16(uint32_t to, const void* from, bool valid = true, Location at = Location::current()) {
  auto& m = simt::machine();
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) m.fail({"cp.async", at}, "misaligned global address");
  m.copy_async(m.shared_at(to, 16, 16, {"cp.async", at}), valid ? from : nullptr);
}
inline void cp_async_commit() { simt::machine().commit_copies(); }
template <int kNewestLeft>
void cp_async_wait() {
  simt::machine().wait_for_copies(kNewestLeft);
}

// ---- ldmatrix

namespace detail {

inline float to_float(uint16_t bits, __nv_bfloat16) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline float to_float(uint16_t bits, __half) {
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

struct MatrixRow {
  alignas(16) uint16_t elements[8];
  uint32_t address;
  uint32_t out[4];
};

// Reads row r of 8x8 matrix i from lane 8 i + r; lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
void exchange_matrices(MatrixRow** lanes, bool transposed);

template <bool kTransposed>
void ldmatrix_x4(uint32_t (&d)[4], uint32_t address, const simt::Site& site) {
  auto& m = simt::machine();
  MatrixRow row{};
  std::memcpy(row.elements, m.shared_at(address, 16, 16, site), 16);
  row.address = address;
  m.collective(~0u, &row, site, [](MatrixRow** lanes) { exchange_matrices(lanes, kTransposed); });
  std::memcpy(d, row.out, sizeof(d));
}

}  // namespace detail

inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t address, Location at = Location::current()) {
  detail::ldmatrix_x4<false>(d, address, {"ldmatrix", at});
}
inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address, Location at = Location::current()) {
  detail::ldmatrix_x4<true>(d, address, {"ldmatrix.trans", at});
}

// ---- mma

namespace detail {

struct MmaLane {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

// Adds a b to d on unpacked fragments, a 16 x 16, b 16 x 8: exact products, each sum rounded once.
void multiply_fragments(MmaLane** lanes, float (*to_float)(uint16_t));

}  // namespace detail

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Location at = Location::current()) {
  detail::MmaLane lane{d, a, {b0, b1}};
  simt::machine().collective(~0u, &lane, {"mma", at}, [](detail::MmaLane** lanes) {
    detail::multiply_fragments(lanes, [](uint16_t bits) { return detail::to_float(bits, T()); });
  });
}

namespace detail {

struct WordMmaLane {
  float* d;
  const float* a;
  float b[2];
};

// Multiplies a 16 x 8, b 8 x 8 likewise.
void multiply_word_fragments(WordMmaLane** lanes);

}  // namespace detail

inline void mma_m16n8k8(float (&d)[4], const float (&a)[4], float b0, float b1, Location at = Location::current()) {
  detail::WordMmaLane lane{d, a, {b0, b1}};
  simt::machine().collective(~0u, &lane, {"mma", at}, detail::multiply_word_fragments);
}

// ---- e4m3

// Converts two e4m3 codes in the low 16 bits to two halves.
inline uint32_t half2_from_e4m3(uint32_t codes) {
  const auto half = [](uint32_t code) {
    const uint32_t sign = (code & 0x80u) << 8, magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return 0x7fffu;  // NaN
    const uint32_t bits = __builtin_bit_cast(uint32_t, static_cast<float>(magnitude & 7u) * 0x1p-9f);
    if (magnitude >= 8) return sign | ((magnitude << 7) + ((15u - 7u) << 10));
    return magnitude == 0 ? sign : sign | ((bits - ((127u - 15u) << 23)) >> 13);  // normal numbers in half
  };
  return half(codes & 0xffu) | half(codes >> 8 & 0xffu) << 16;
}

// Rounds two numbers to nearest even, saturates at 448; NaN becomes 0x7f.
inline uint32_t e4m3_from_floats(float low, float high) {
  const auto code = [](float value) -> uint32_t {
    const uint32_t sign = std::signbit(value) ? 0x80u : 0u;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return 0x7fu;
    if (magnitude >= 448.0f) return sign | 0x7eu;
    // Spacing: 2^-9 up to 2^-6, else 1/8 of the power of two below.
    const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
    const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(double{magnitude}, 3 - exponent)));
    return sign | (static_cast<uint32_t>(exponent + 6) * 8u + steps);  // a carry enters the exponent
  };
  return code(low) | code(high) << 8;
}

// ---- maxima

// Returns maxima of one float, or of two halves or bfloat16. NaN wins; +0 exceeds -0.
template <typename T>
uint32_t max_nan(uint32_t a, uint32_t b) {
  constexpr uint32_t kBits = 8 * sizeof(T), kNumber = kBits == 32 ? ~0u : 0xffffu;
  constexpr uint32_t kInfinity = kBits == 32 ? 0x7f800000u : std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  constexpr uint32_t kSign = 1u << (kBits - 1);
  uint32_t d = 0;
  for (uint32_t shift = 0; shift < 32; shift += kBits) {
    const uint32_t x = a >> shift & kNumber, y = b >> shift & kNumber;
    const auto rank = [&](uint32_t number) {  // integer in numeric order
      return number & kSign ? int64_t{-1} - (number & ~kSign) : int64_t{number};
    };
    const auto is_nan = [&](uint32_t number) { return (number & ~kSign) > kInfinity; };
    const uint32_t nan = kNumber & ~kSign;
    d |= (is_nan(x) || is_nan(y) ? nan : rank(x) < rank(y) ? y : x) << shift;
  }
  return d;
}

// ---- launches are serial here

inline void let_next_kernel_start() {}
inline void wait_for_kernels_before() {}

// ---- clusters

inline uint32_t cluster_size() { return static_cast<uint32_t>(simt::machine().cluster_size()); }
inline uint32_t cluster_rank() { return simt::machine().self().rank; }
inline uint32_t cluster_index() { return blockIdx.x / cluster_size(); }
inline void cluster_sync(Location at = Location::current()) {
  simt::machine().cluster_barrier({"barrier.cluster", at});
}
inline void meet_cluster(Location at = Location::current()) { cluster_sync(at); }
template <typename T>
T* of_cta(T* shared, uint32_t rank, Location at = Location::current()) {
  auto& m = simt::machine();
  const uint32_t address = smem_addr(shared);
  m.shared_at(address, sizeof(T), alignof(T), {"mapa", at});
  return reinterpret_cast<T*>(m.shared_memory_of(rank, {"mapa", at}) + address);
}

// ---- others

// Releases and acquires for the whole GPU.
inline unsigned fetch_add(unsigned* word, unsigned value) { return atomicAdd(word, value); }
inline unsigned load_acquire(const unsigned* word) { return std::atomic_ref(*const_cast<unsigned*>(word)).load(); }

inline uint32_t thread_index() { return threadIdx.x; }

inline void barrier_sync(unsigned id, unsigned num_threads, Location at = Location::current()) {
  simt::machine().barrier(id, num_threads, {"bar.sync", at});
}
inline void barrier_arrive(unsigned id, unsigned num_threads, Location at = Location::current()) {
  simt::machine().barrier_arrive(id, num_threads, {"bar.arrive", at});
}
inline float ex2(float x) {  // .ftz: a subnormal result is 0
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}

}  // namespace pagedtree::ptx
