// Largest logit per row, and per block and lane, by which later scans skip blocks.
#pragma once

#include "cpu/isa/logits/adjusted_row.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

static_assert(kLanes <= kMostLanes && kPeakBlock % kLanes == 0);

// Returns the first token with this logit, which must exist; `begin` is a multiple of kLanes.
template <typename T>
static inline int64_t first_token_of(const LogitRow& row, float logit, int64_t begin) {
  while (true) {
    const uint32_t lanes = lane_bits(load_logits<T>(row, begin) == splat(logit));
    if (lanes != 0) return begin + __builtin_ctz(lanes);
    begin += kLanes;
  }
}

// Computes penalties that only lower logits just for candidates.
static inline Peak find_adjusted_peak(const LogitRow& row, float* peaks) {
  AdjustedRow& a = adjusted_row(row);
  const int64_t num_blocks = ceil_div<int64_t>(row.vocab, kPeakBlock);
  vint nan{};
  with_memory(a.memory.dtype, [&]<typename T>() {
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t end = min_of<int64_t>((block + 1) * kPeakBlock, row.vocab);
      const bool has_masks = may_forbid_in_block(a, block);
      vfloat best = splat(-kInfinity);
      for (int64_t t = block * kPeakBlock; t < end; t += kLanes) {
        const vfloat raw = load_raw<T>(a.memory, t);
        nan |= raw != raw;
        best = max(has_masks ? masked(a, raw, t) : finite_or_less(a, raw), best);
      }
      store(peaks + block * kLanes, best);
      a.most[block] = reduce_max(best);
      a.exactness[block] = a.pays ? Exactness::kBounds : Exactness::kPeaks;
    }
  });
  for (int64_t i = 0; i < a.num_patched; ++i) {
    const int64_t block = a.columns[i] / kPeakBlock;
    const float value = a.values[a.columns[i]];
    a.most[block] = max_of(a.most[block], value);
    a.exactness[block] = Exactness::kBounds;
    float& peak = peaks[block * kLanes + a.columns[i] % kLanes];
    peak = max_of(peak, value);
  }
  for (int64_t block = 0; block < num_blocks && !a.lowers; ++block)
    find_block_peaks(a, block, peaks, Exactness::kPeaks);
  const auto is_known = [&](int64_t block) { return a.exactness[block] != Exactness::kBounds; };
  Peak peak;
  peak.has_nan = lane_bits(nan) != 0;
  int64_t best = 0;
  while (true) {  // best bound first, until all others are lower
    for (int64_t block = 0; block < num_blocks; ++block) {
      const bool higher = a.most[block] > a.most[best];
      if (higher || (a.most[block] == a.most[best] && is_known(best) && !is_known(block))) best = block;
    }
    if (num_blocks == 0 || is_known(best) || a.most[best] == -kInfinity) break;
    find_block_peaks(a, best, peaks, Exactness::kMost);
  }
  if (num_blocks == 0 || a.most[best] == -kInfinity) return peak;
  for (int64_t block = 0; block < best; ++block) {
    if (a.most[block] == a.most[best]) best = block;
  }
  peak.logit = a.most[best];
  peak.token = first_token_of<AdjustedLogit>(row, peak.logit, best * kPeakBlock);
  return peak;
}

// Finds the peak, and writes peaks per block and lane, which are bounds under request options.
template <typename T>
static inline Peak find_peak(const LogitRow& row, float* peaks) {
  if constexpr (std::is_same_v<T, AdjustedLogit>) return find_adjusted_peak(row, peaks);
  Peak peak;
  vint nan{};
  for (int64_t block = 0; block < row.vocab; block += kPeakBlock) {
    const int64_t end = min_of<int64_t>(block + kPeakBlock, row.vocab);
    vfloat best = splat(-kInfinity);
    for (int64_t t = block; t < end; t += kLanes) {
      const vfloat raw = load_raw<T>(row, t);
      nan |= raw != raw;
      best = max(clean<T>(raw, row, t), best);
    }
    store(peaks + block / kPeakBlock * kLanes, best);
    if (reduce_max(best) > peak.logit) {
      peak.logit = reduce_max(best);
      peak.token = block;
    }
  }
  peak.has_nan = lane_bits(nan) != 0;
  if (peak.logit > -kInfinity) peak.token = first_token_of<T>(row, peak.logit, peak.token);
  return peak;
}

static inline vfloat peaks_at(const float* peaks, int64_t t) { return load(peaks + t / kPeakBlock * kLanes); }

template <typename T>
static inline bool has_peaks(const LogitRow& row, int64_t t) {
  if constexpr (!std::is_same_v<T, AdjustedLogit>) return true;
  return adjusted_row(row).exactness[t / kPeakBlock] == Exactness::kPeaks;
}

// Returns false only if the block is below `least`.
static inline bool reaches(const float* peaks, int64_t t, float least) {
  return lane_bits(peaks_at(peaks, t) >= splat(least)) != 0;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
