// Types and helpers of all backends; no Torch, no CUDA runtime.
#pragma once

#include <cstdint>

// Always inlined: the CPU backend compiles this once per instruction set, and the linker must not share a copy.
#if defined(__CUDACC__)
#define PT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PT_HOST_DEVICE inline __attribute__((always_inline))
#endif

// For loops that run once: on a GPU, unrolled code costs instruction fetches.
#if defined(__CUDA_ARCH__)
#define PT_NO_UNROLL _Pragma("unroll 1")
#else
#define PT_NO_UNROLL
#endif

#define PT_EXPORT __attribute__((visibility("default")))

namespace pagedtree {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3 };

PT_HOST_DEVICE constexpr int64_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8E4M3 ? 1 : 2;
}

constexpr int kMaxTreeNodes = 1024;
constexpr int64_t kMaxRows = int64_t{1} << 31;  // of a batch: offsets are int32
constexpr int kMaxCandidates = 1 << 20;         // of a growing draft tree
constexpr int kMaxNgram = 64;
constexpr int64_t kMaxVocab = 1 << 20;
constexpr int kMaskWordBits = 32;

template <typename T>
PT_HOST_DEVICE constexpr T ceil_div(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

template <typename T>
PT_HOST_DEVICE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
PT_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

template <typename T>
PT_HOST_DEVICE constexpr T clamp_to(T value, T low, T high) {
  return min_of(max_of(value, low), high);
}

PT_HOST_DEVICE int popcount32(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// Returns the largest power of two <= value, 0 if there is none.
PT_HOST_DEVICE int32_t highest_bit(int32_t value) {
#if defined(__CUDA_ARCH__)
  return value > 0 ? 1 << (31 - __clz(value)) : 0;
#else
  return value > 0 ? 1 << (31 - __builtin_clz(static_cast<unsigned>(value))) : 0;
#endif
}

}  // namespace pagedtree
