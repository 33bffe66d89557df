// A row under request options as vectors of clean floats. Logits are adjusted when they are first read, a block of
// kPeakBlock at a time, and kept as floats. Most blocks have no likely token: neither their counts nor their logits are
// looked at after the first scan.
#pragma once

#include "core/options.h"
#include "cpu/isa/logits/row.h"
#include "cpu/isa/tile/math.h"
#include "cpu/logits_scratch.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct AdjustedLogit {};
// The dtype of a LogitRow whose logits are an AdjustedRow.
constexpr DType kAdjusted = static_cast<DType>(-1);

static inline AdjustedRow& adjusted_row(const LogitRow& row) {
  return *static_cast<AdjustedRow*>(const_cast<void*>(row.logits));
}

// Calls body.template operator()<T>() with the type that logits in memory are stored in.
template <typename Body>
static inline auto with_memory(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body.template operator()<Float16>();
    case DType::kBFloat16:
      return body.template operator()<BFloat16>();
    default:
      return body.template operator()<float>();
  }
}

// The same for rows that may be adjusted.
template <typename Body>
static inline auto with_logits(DType dtype, const Body& body) {
  if (dtype == kAdjusted) return body.template operator()<AdjustedLogit>();
  return with_memory(dtype, body);
}

static inline vfloat load_memory(const LogitRow& memory, int64_t begin) {
  return with_memory(memory.dtype, [&]<typename T>() { return load_raw<T>(memory, begin); });
}

// Bits `first` .. `first` + kLanes - 1 of a packed mask of `size` bits, and others above them.
static inline uint32_t word_at(const int32_t* words, int64_t first, int64_t size) {
  uint64_t window = static_cast<uint32_t>(words[first / 32]);
  if (first % 32 + kLanes <= 32) return static_cast<uint32_t>(window >> first % 32);
  if (first / 32 + 1 < ceil_div<int64_t>(size, 32)) {
    window |= uint64_t{static_cast<uint32_t>(words[first / 32 + 1])} << 32;
  }
  return static_cast<uint32_t>(window >> first % 32);
}

// Lane i = bit i is set.
static inline vint lanes_of(uint32_t word) { return ((splat(word) >> bits<vuint>(lane_index())) & 1u) != 0u; }

// What the masks leave of a vector, before penalties and patches.
static inline vfloat masked(const AdjustedRow& a, vfloat raw, int64_t begin) {
  vfloat logit = min(max(raw, splat(-kInfinity)), splat(a.largest)) + 0.0f;
  if (may_forbid(a.memory, begin)) logit = select(load_allowed(a.memory, begin), logit, splat(-kInfinity));
  if (a.allowed_mask != nullptr) {
    const uint32_t allowed = word_at(a.allowed_mask, a.first_token + begin, a.vocab);
    if ((~allowed & kAllLanes) != 0) logit = select(lanes_of(allowed), logit, splat(-kInfinity));
  }
  return logit;
}

static inline vint load_counts(const AdjustedRow& a, int64_t begin) {
  vint counts{};
  if (a.counts == nullptr) return counts;
  if (begin + kLanes <= a.memory.vocab) return load_as<vint>(a.counts + begin);
  std::memcpy(&counts, a.counts + begin, static_cast<size_t>(a.memory.vocab - begin) * sizeof(int32_t));
  return counts;
}

// The adjusted logits of a vector, given those in memory; lanes past the row are -inf.
static inline vfloat adjust(const AdjustedRow& a, vfloat raw, int64_t begin) {
  vfloat logit = masked(a, raw, begin);
  if (a.pays) {
    const vint counts = load_counts(a, begin);
    const vint in_prompt =
        a.prompt_mask == nullptr ? vint{} : lanes_of(word_at(a.prompt_mask, a.first_token + begin, a.vocab));
    const vint said = counts > 0;
    if (lane_bits(said | in_prompt) != 0) {
      const vfloat times = __builtin_convertvector(said ? counts : vint{}, vfloat);
      logit = min(penalised<VectorMath>(a.penalties, logit, times, in_prompt), splat(kMaxFloat));
    }
  }
  const uint32_t patched = a.patched[begin / 32] >> begin % 32 & kAllLanes;
  return patched == 0 ? logit : select(lanes_of(patched), load(a.values + begin), logit);
}

// Adjusts a block, and replaces the bounds of its peaks, one per lane, by the peaks themselves.
static __attribute__((noinline)) void adjust_block(AdjustedRow& a, int64_t block, float* peaks) {
  const int64_t end = min_of((block + 1) * kPeakBlock, a.memory.vocab);
  vfloat best = splat(-kInfinity);
  with_memory(a.memory.dtype, [&]<typename T>() {
    for (int64_t t = block * kPeakBlock; t < end; t += kLanes) {
      const vfloat logit = adjust(a, load_raw<T>(a.memory, t), t);
      store(a.values + t, logit);
      best = max(logit, best);
    }
  });
  if (peaks != nullptr) store(peaks + block * kLanes, best);
  a.most[block] = reduce_max(best);
  a.is_adjusted[block] = true;
}

// Before the block that `begin` is in is scanned. Without `peaks` their bounds stay, which suffices once the filters'
// threshold is known.
template <typename T>
static inline void prepare_block(const LogitRow& row, int64_t begin, float* peaks) {
  if constexpr (std::is_same_v<T, AdjustedLogit>) {
    AdjustedRow& a = adjusted_row(row);
    if (!a.is_adjusted[begin / kPeakBlock]) adjust_block(a, begin / kPeakBlock, peaks);
  }
}

// NaN is -inf here already: find_adjusted_peak() tells whether there is one.
template <>
inline vfloat load_raw<AdjustedLogit>(const LogitRow& row, int64_t begin) {
  const AdjustedRow& a = adjusted_row(row);
  return a.is_adjusted[begin / kPeakBlock] ? load(a.values + begin) : adjust(a, load_memory(a.memory, begin), begin);
}
template <>
inline vfloat clean<AdjustedLogit>(vfloat raw, const LogitRow&, int64_t) {
  return raw;
}

// Logits, or bounds of them where those cost less.
template <typename T>
static inline vfloat load_bounds(const LogitRow& row, int64_t begin) {
  return load_logits<T>(row, begin);
}
template <>
inline vfloat load_bounds<AdjustedLogit>(const LogitRow& row, int64_t begin) {
  const AdjustedRow& a = adjusted_row(row);
  const bool any_patched = (a.patched[begin / 32] >> begin % 32 & kAllLanes) != 0;
  if (!a.lowers || any_patched || a.is_adjusted[begin / kPeakBlock]) return load_logits<AdjustedLogit>(row, begin);
  return masked(a, load_memory(a.memory, begin), begin);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
