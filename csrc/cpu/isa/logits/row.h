// A row as vectors of clean floats: NaN becomes -inf, +inf the type's largest number, -0 becomes +0, forbidden tokens
// and lanes past the vocabulary -inf.
#pragma once

#include <type_traits>

#include "core/sampling.h"
#include "cpu/isa/tile/convert.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct UniformLogit {};  // a row without finite logits reads as zeros

template <typename T>
constexpr float kLargest = kMaxFloat;  // replaces +inf
template <>
inline constexpr float kLargest<BFloat16> = kMaxBFloat16;
template <>
inline constexpr float kLargest<Float16> = kMaxFloat16;

static inline vfloat load_values(const float* p) { return load_float<DType::kFloat32>(p); }
static inline vfloat load_values(const Float16* p) { return load_float<DType::kFloat16>(p); }
static inline vfloat load_values(const BFloat16* p) { return load_float<DType::kBFloat16>(p); }

constexpr uint32_t kAllLanes = static_cast<uint32_t>((uint64_t{1} << kLanes) - 1);

static inline vint lanes_before(int64_t end, int64_t begin) {
  return lane_index() < static_cast<int32_t>(clamp_to<int64_t>(end, begin, begin + kLanes) - begin);
}

// Returns false if a grammar forbids none of these tokens; most masks are mostly ones.
static inline bool may_forbid(const LogitRow& row, int64_t begin) {
  if (row.allowed_words == nullptr) return row.allowed != nullptr;
  return (~static_cast<uint32_t>(row.allowed_words[begin / 32]) >> (begin % 32) & kAllLanes) != 0;
}

static inline vint load_allowed(const LogitRow& row, int64_t begin) {
  if (row.allowed_words != nullptr) {
    const uint32_t word = static_cast<uint32_t>(row.allowed_words[begin / 32]) >> (begin % 32);
    return ((splat(word) >> bits<vuint>(lane_index())) & 1u) != 0u;
  }
  vbyte flags{};
  std::memcpy(&flags, row.allowed + begin, min_of<int64_t>(kLanes, row.vocab - begin));
  return __builtin_convertvector(flags, vint) != 0;
}

template <typename T>
static inline vfloat load_raw(const LogitRow& row, int64_t begin) {
  const T* logits = static_cast<const T*>(row.logits) + begin;
  const int64_t left = row.vocab - begin;
  if (left >= kLanes) return load_values(logits);
  T tail[kLanes] = {};
  std::memcpy(tail, logits, static_cast<size_t>(left) * sizeof(T));
  return select(lane_index() < static_cast<int32_t>(left), load_values(tail), splat(-kInfinity));
}

template <>
inline vfloat load_raw<UniformLogit>(const LogitRow& row, int64_t begin) {
  return select(lanes_before(row.vocab, begin), splat(0.0f), splat(-kInfinity));
}

template <typename T>
static inline vfloat clean(vfloat raw, const LogitRow& row, int64_t begin) {
  const vfloat value = min(max(raw, splat(-kInfinity)), splat(kLargest<T>)) + 0.0f;
  if constexpr (!std::is_same_v<T, UniformLogit>) {
    if (may_forbid(row, begin)) return select(load_allowed(row, begin), value, splat(-kInfinity));
  }
  return value;
}

template <typename T>
static inline vfloat load_logits(const LogitRow& row, int64_t begin) {
  return clean<T>(load_raw<T>(row, begin), row, begin);
}

template <typename T>
static inline float logit_at(const LogitRow& row, int64_t token) {
  return load_logits<T>(row, token - token % kLanes)[token % kLanes];
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
