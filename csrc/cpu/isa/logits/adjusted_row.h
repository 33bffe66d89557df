// A row under request options. Logits are adjusted on reading, and only if a cheap bound shows that they matter: most
// counts and patches are never read.
// logit = patched ? value : penalised(masked(min(raw, largest)))
#pragma once

#include <algorithm>

#include "core/options.h"
#include "cpu/isa/logits/row.h"
#include "cpu/isa/tile/math.h"
#include "cpu/logits_scratch.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct AdjustedLogit {};
// dtype of rows that point to an AdjustedRow.
constexpr DType kAdjusted = static_cast<DType>(-1);

static inline AdjustedRow& adjusted_row(const LogitRow& row) {
  return *static_cast<AdjustedRow*>(const_cast<void*>(row.logits));
}

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

template <typename Body>
static inline auto with_logits(DType dtype, const Body& body) {
  if (dtype == kAdjusted) return body.template operator()<AdjustedLogit>();
  return with_memory(dtype, body);
}

static inline vfloat load_memory(const LogitRow& memory, int64_t begin) {
  return with_memory(memory.dtype, [&]<typename T>() { return load_raw<T>(memory, begin); });
}

// Bits from `first` on of a packed mask of `size` bits; bits above kLanes are arbitrary.
static inline uint32_t word_at(const int32_t* words, int64_t first, int64_t size) {
  uint64_t window = static_cast<uint32_t>(words[first / 32]);
  if (first % 32 + kLanes <= 32) return static_cast<uint32_t>(window >> first % 32);
  if (first / 32 + 1 < ceil_div<int64_t>(size, 32)) {
    window |= uint64_t{static_cast<uint32_t>(words[first / 32 + 1])} << 32;
  }
  return static_cast<uint32_t>(window >> first % 32);
}

static inline vint lanes_of(uint32_t word) { return ((splat(word) >> bits<vuint>(lane_index())) & 1u) != 0u; }

static inline bool has_zeros(const AdjustedRow& a, int64_t block) {
  const int64_t begin = block * kPeakBlock, end = begin + kPeakBlock;
  if (end > a.memory.vocab || (a.memory.allowed_words == nullptr && a.memory.allowed != nullptr)) return true;
  int32_t all = -1;
  if (a.memory.allowed_words != nullptr) {
    for (int64_t i = begin / 32; i < end / 32; ++i) all &= a.memory.allowed_words[i];
  }
  if (a.allowed_mask != nullptr) {
    const int64_t first = (a.first_token + begin) / 32, last = (a.first_token + end - 1) / 32;
    for (int64_t i = first; i <= last; ++i) all &= a.allowed_mask[i];
  }
  return all != -1;
}

// Returns true if a mask may forbid a token of the block. Computed once: most masks are mostly ones.
static inline bool may_forbid_in_block(const AdjustedRow& a, int64_t block) {
  if (a.masks[block] == BlockMasks::kUnknown) {
    a.masks[block] = has_zeros(a, block) ? BlockMasks::kForbid : BlockMasks::kAllow;
  }
  return a.masks[block] == BlockMasks::kForbid;
}

static inline vfloat finite_or_less(const AdjustedRow& a, vfloat raw) {
  return min(max(raw, splat(-kInfinity)), splat(a.largest)) + 0.0f;
}

// Applies masks, before penalties and patches.
static inline vfloat masked(const AdjustedRow& a, vfloat raw, int64_t begin) {
  vfloat logit = finite_or_less(a, raw);
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

static inline vint in_prompt_of(const AdjustedRow& a, int64_t begin) {
  return a.prompt_mask == nullptr ? vint{} : lanes_of(word_at(a.prompt_mask, a.first_token + begin, a.vocab));
}

static inline vint payers_of(const AdjustedRow& a, int64_t begin) {
  return (load_counts(a, begin) > 0) | in_prompt_of(a, begin);
}

static inline vfloat penalised_lanes(const AdjustedRow& a, vfloat logit, int64_t begin) {
  const vint counts = load_counts(a, begin), in_prompt = in_prompt_of(a, begin);
  const vint said = counts > 0;
  if (lane_bits(said | in_prompt) == 0) return logit;
  const vfloat times = __builtin_convertvector(said ? counts : vint{}, vfloat);
  return min(penalised<VectorMath>(a.penalties, logit, times, in_prompt), splat(kMaxFloat));
}

// Returns adjusted logits, -inf past the row. Lanes without `matters(bound)`, a monotone predicate, may hold upper
// bounds.
template <typename Matters>
static inline vfloat adjust_if(const AdjustedRow& a, vfloat raw, int64_t begin, bool has_masks,
                               const Matters& matters) {
  vfloat logit = has_masks ? masked(a, raw, begin) : finite_or_less(a, raw);
  if (a.pays && (!a.lowers || lane_bits(matters(logit)) != 0)) logit = penalised_lanes(a, logit, begin);
  const uint32_t patched = a.patched[begin / 32] >> begin % 32 & kAllLanes;
  return patched == 0 ? logit : select(lanes_of(patched), load(a.values + begin), logit);
}

static inline vfloat adjust(const AdjustedRow& a, vfloat raw, int64_t begin, bool has_masks = true) {
  return adjust_if(a, raw, begin, has_masks, [](vfloat bound) { return bound == bound; });
}

// Replaces bounds of a block's peaks by peaks, or by bounds whose largest is a peak, which reads few counts.
static inline __attribute__((noinline)) void find_block_peaks(AdjustedRow& a, int64_t block, float* peaks,
                                                              Exactness wanted) {
  const int64_t end = min_of<int64_t>((block + 1) * kPeakBlock, a.memory.vocab);
  const bool has_masks = may_forbid_in_block(a, block);
  vfloat best = splat(-kInfinity);
  float most = -kInfinity, least = -kInfinity;
  with_memory(a.memory.dtype, [&]<typename T>() {
    for (int64_t t = block * kPeakBlock; t < end; t += kLanes) {
      const auto matters = [&](vfloat bound) { return bound > splat(least); };
      const vfloat logit = adjust_if(a, load_raw<T>(a.memory, t), t, has_masks, matters);
      best = max(logit, best);
      if (lane_bits(logit > splat(most)) == 0) continue;
      most = reduce_max(best);
      if (wanted == Exactness::kMost) least = most;
    }
  });
  store(peaks + block * kLanes, best);
  a.most[block] = most;
  a.exactness[block] = a.lowers ? wanted : Exactness::kPeaks;
}

// Loads NaN as -inf; find_adjusted_peak() reports it.
template <>
inline vfloat load_raw<AdjustedLogit>(const LogitRow& row, int64_t begin) {
  const AdjustedRow& a = adjusted_row(row);
  return adjust(a, load_memory(a.memory, begin), begin);
}
template <>
inline vfloat clean<AdjustedLogit>(vfloat raw, const LogitRow&, int64_t) {
  return raw;
}

// Loads bounds instead of logits for vectors without lanes that `matters`, where cheaper.
template <typename T, typename Matters>
static inline vfloat load_if(const LogitRow& row, int64_t begin, const Matters& matters) {
  if constexpr (!std::is_same_v<T, AdjustedLogit>) return load_logits<T>(row, begin);
  const AdjustedRow& a = adjusted_row(row);
  return adjust_if(a, load_memory(a.memory, begin), begin, true, matters);
}

template <typename T>
static inline vfloat load_bounds(const LogitRow& row, int64_t begin) {
  return load_if<T>(row, begin, [](vfloat) { return vint{}; });
}

template <typename T>
static inline bool has_bounds(const LogitRow& row) {
  if constexpr (!std::is_same_v<T, AdjustedLogit>) return false;
  return adjusted_row(row).pays;
}

template <typename T>
class BlockReader {
 public:
  explicit BlockReader(const LogitRow& row) : row_(row) {}
  // Allows adjusted logits below `least` to read as others below it.
  void open(int64_t, float least) { least_ = least; }
  // Returns false only if the whole vector is below `least`.
  bool may_reach(int64_t t) const { return lane_bits((*this)(t) >= splat(least_)) != 0; }
  // Tests `count` vectors without reading them.
  static bool any_may_reach(int64_t, int) { return true; }
  bool reads_all() const { return least_ == -kInfinity; }
  vfloat operator()(int64_t t) const { return load_logits<T>(row_, t); }
  // Requires `reads_all`.
  vfloat known(int64_t t) const { return (*this)(t); }

 private:
  const LogitRow& row_;
  float least_ = -kInfinity;
};

template <>
class BlockReader<AdjustedLogit> {
 public:
  explicit BlockReader(const LogitRow& row) : a_(adjusted_row(row)) {}
  void open(int64_t begin, float least) {
    begin_ = begin;
    least_ = least;
    has_masks_ = may_forbid_in_block(a_, begin / kPeakBlock);
    reads_all_ = least == -kInfinity || !a_.lowers;
    if (reads_all_) {
      keep();
    } else {
      find_vectors();
    }
  }
  bool may_reach(int64_t t) const {
    if (reads_all_) return lane_bits(load(a_.values + t) >= splat(least_)) != 0;
    return any_may_reach(t, 1);
  }
  bool reads_all() const { return reads_all_; }
  // Requires t to be a multiple of kLanes * count.
  bool any_may_reach(int64_t t, int count) const {
    if (reads_all_) return true;
    const int64_t i = (t - begin_) / kLanes;
    return (vectors_[i / 64] >> i % 64 & ((uint64_t{1} << count) - 1)) != 0;
  }
  vfloat known(int64_t t) const { return load(a_.values + t); }
  vfloat operator()(int64_t t) const {
    if (reads_all_) return known(t);
    if (!may_reach(t)) return splat(-kInfinity);
    return adjust_if(a_, load_memory(a_.memory, t), t, has_masks_,
                     [&](vfloat bound) { return bound >= splat(least_); });
  }

 private:
  int64_t end() const { return min_of<int64_t>(begin_ + kPeakBlock, a_.memory.vocab); }
  // Adjusts the whole block for repeated reads.
  __attribute__((noinline)) void keep() {
    uint8_t& is_kept = a_.is_kept[begin_ / kPeakBlock];
    if (is_kept) return;
    is_kept = true;
    const AdjustedRow a = a_;
    const bool has_masks = has_masks_;
    const int64_t begin = begin_, count = ceil_div<int64_t>(end() - begin, kLanes);
    const auto put = [&](int64_t t, vfloat logit) {
      const uint32_t patched = a.patched[t / 32] >> t % 32 & kAllLanes;
      store(a.values + t, patched == 0 ? logit : select(lanes_of(patched), load(a.values + t), logit));
    };
    uint64_t payers[kWords] = {};
    with_memory(a.memory.dtype, [&]<typename T>() {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t t = begin + i * kLanes;
        const vfloat raw = load_raw<T>(a.memory, t);
        put(t, has_masks ? masked(a, raw, t) : finite_or_less(a, raw));
        payers[i / 64] |= uint64_t{lane_bits(payers_of(a, t)) != 0} << i % 64;
      }
    });
    // Separate, because no branch predictor foresees payers.
    for (int64_t word = 0; word < kWords; ++word) {
      for (uint64_t left = payers[word]; left != 0; left &= left - 1) {
        const int64_t t = begin + (word * 64 + __builtin_ctzll(left)) * kLanes;
        put(t, penalised_lanes(a, load(a.values + t), t));
      }
    }
  }
  // Marks vectors whose raw or patched logits reach `least`. Reuses the result for a lower `least`.
  __attribute__((noinline)) void find_vectors() {
    const int64_t block = begin_ / kPeakBlock;
    vectors_ = a_.found + block * kWords;
    if (a_.found_least[block] <= least_) return;
    a_.found_least[block] = least_;
    std::fill_n(vectors_, kWords, 0);
    const LogitRow memory = a_.memory;
    const vfloat least = splat(least_);
    const int64_t begin = begin_, count = ceil_div<int64_t>(end() - begin, kLanes);
    with_memory(memory.dtype, [&]<typename T>() {
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t lanes = lane_bits(load_raw<T>(memory, begin + i * kLanes) >= least);
        vectors_[i / 64] |= uint64_t{lanes != 0} << i % 64;
      }
    });
    for (int64_t word = 0; word * 32 < count * kLanes && a_.num_patched > 0; ++word) {
      for (uint32_t left = a_.patched[begin / 32 + word]; left != 0; left &= left - 1) {
        const int64_t column = word * 32 + __builtin_ctz(left), i = column / kLanes;
        if (a_.values[begin + column] >= least_) vectors_[i / 64] |= uint64_t{1} << i % 64;
      }
    }
  }

  static constexpr int kWords = kPeakBlock / kLanes / 64 > 0 ? kPeakBlock / kLanes / 64 : 1;
  static_assert(kWords <= kMostWords);
  AdjustedRow& a_;
  int64_t begin_ = 0;
  float least_ = -kInfinity;
  bool has_masks_ = true, reads_all_ = true;
  uint64_t* vectors_ = nullptr;  // bits: vectors to read
};

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
