// The filters' threshold on a row of logits, found in a few scans, without sorting it and without a copy of it: the
// peak, then a radix search over the logits' order.
#pragma once

#include "core/sampling.h"
#include "cpu/tile/logits.h"
#include "cpu/tile/math.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

template <typename T>
static inline Peak find_peak(const LogitRow& row) {
  constexpr int64_t kBlock = 1024;
  Peak peak;
  vint nan{};
  for (int64_t block = 0; block < row.vocab; block += kBlock) {
    const int64_t end = min_of(block + kBlock, row.vocab);
    vfloat best = splat(-kInfinity);
    for (int64_t t = block; t < end; t += kLanes) {
      const vfloat raw = load_raw<T>(row, t);
      nan |= raw != raw;
      best = max(clean<T>(raw, row, t), best);
    }
    if (reduce_max(best) > peak.logit) {
      peak.logit = reduce_max(best);
      peak.token = block;
    }
  }
  peak.has_nan = lane_bits(nan) != 0;
  if (peak.logit == -kInfinity) return peak;
  while (true) {
    const uint32_t lanes = lane_bits(load_logits<T>(row, peak.token) == splat(peak.logit));
    if (lanes != 0) {
      peak.token += __builtin_ctz(lanes);
      return peak;
    }
    peak.token += kLanes;
  }
}

// The threshold is found by radix search: tokens are counted by the high half of their logits' 32-bit order key, then,
// inside the half where the threshold lies, by the low half. A bfloat16 logit has no low half: one table settles it.
template <typename T>
constexpr bool kOneTable = std::is_same_v<T, BFloat16>;
constexpr uint32_t kMinusInfinityBin = 0x007f;  // nothing else but -inf is there or below

// What one search sees of a row: tokens with x below `min_x` read as -inf; masses are counted where `weighted`.
struct View {
  const LogitRow& row;
  Scale scale;
  float min_x;
  bool weighted;
};

// The table of one half. Its bins are exact logits unless a low half follows; then the mass of a bin is its count times
// one weight, and only a table of inexact bins needs `masses`.
struct Digits {
  uint32_t* counts;
  uint64_t* masses;  // null: bins are exact
  RowTotals* blocks;
  bool low;
  uint32_t prefix;  // of a low half: the high half

  template <typename M>
  typename M::Uint key_of(typename M::Uint bin) const {
    if (low) return bin | (prefix << 16);
    return (bin << 16) | (((bin >> 15) - 1u) & 0xffffu);  // of negative logits the key is the complement
  }
};

static inline void add(RowTotals& sum, const RowTotals& other) {
  sum.count += other.count;
  sum.mass += other.mass;
}

static inline RowTotals bin_totals(const View& view, const Digits& digits, uint32_t bin) {
  const uint64_t count = digits.counts[bin];
  if (!view.weighted || count == 0) return {count, 0};
  if (digits.masses != nullptr) return {count, digits.masses[bin]};
  const float logit = logit_of_key<ScalarMath>(digits.key_of<ScalarMath>(bin));
  return {count, count * weight_of<ScalarMath>(view.scale(logit))};
}

static inline RowTotals block_totals(const View& view, const Digits& digits, int block) {
  typedef uint64_t vmass __attribute__((vector_size(kLanes * 8)));
  vuint count{};
  vmass mass{};
  for (int i = 0; i < kBlockBins; i += kLanes) {
    const int bin = block * kBlockBins + i;
    const vuint counts = load_as<vuint>(digits.counts + bin);
    count += counts;
    if (!view.weighted || lane_bits(counts != 0u) == 0) continue;
    if (digits.masses != nullptr) {
      mass += load_as<vmass>(digits.masses + bin);
    } else {
      const vuint bins = bits<vuint>(lane_index()) + static_cast<uint32_t>(bin);
      const vuint weights =
          weight_of<VectorMath>(view.scale(logit_of_key<VectorMath>(digits.key_of<VectorMath>(bins))));
      mass += __builtin_convertvector(counts, vmass) * __builtin_convertvector(weights, vmass);
    }
  }
  RowTotals totals{0, 0};
  for (int i = 0; i < kLanes; ++i) add(totals, {count[i], mass[i]});
  return totals;
}

template <typename T>
static inline void tabulate(const View& view, const Digits& digits) {
  std::memset(digits.counts, 0, kBins * sizeof(*digits.counts));
  if (digits.masses != nullptr) std::memset(digits.masses, 0, kBins * sizeof(*digits.masses));
  for (int64_t t = 0; t < view.row.vocab; t += kLanes) {
    const vfloat logit = load_logits<T>(view.row, t);
    const vfloat x = view.scale(logit);
    const vuint key = order_key<VectorMath>(select(x >= view.min_x, logit, splat(-kInfinity)));
    const vuint bin = digits.low ? key & 0xffffu : key >> 16;
    uint32_t bins[kLanes];
    std::memcpy(bins, &bin, sizeof(bins));
    if (digits.low) {
      for (uint32_t lanes = lane_bits((key >> 16) == digits.prefix); lanes != 0; lanes &= lanes - 1) {
        ++digits.counts[bins[__builtin_ctz(lanes)]];
      }
      continue;
    }
    for (int i = 0; i < kLanes; ++i) ++digits.counts[bins[i]];
    if (digits.masses == nullptr) continue;
    const vuint weight = weight_of<VectorMath>(x);
    for (int i = 0; i < kLanes; ++i) digits.masses[bins[i]] += weight[i];
  }
  if (!digits.low) std::memset(digits.counts, 0, (kMinusInfinityBin + 1) * sizeof(*digits.counts));
  if (digits.masses != nullptr) std::memset(digits.masses, 0, (kMinusInfinityBin + 1) * sizeof(*digits.masses));
  for (int block = 0; block < kBlocks; ++block) digits.blocks[block] = block_totals(view, digits, block);
}

// The largest logit such that the tokens at or above it reach `target` in `measure`.
struct Cut {
  float logit;
  RowTotals above{};
  RowTotals at{};
};

// Finds the bin of the cut, counting from the top what lies above it. The table reaches `target`.
static inline uint32_t search(const View& view, const Digits& digits, uint64_t RowTotals::* measure, uint64_t target,
                              Cut& cut) {
  int block = kBlocks - 1;
  for (; block > 0 && cut.above.*measure + digits.blocks[block].*measure < target; --block) {
    add(cut.above, digits.blocks[block]);
  }
  for (uint32_t bin = static_cast<uint32_t>((block + 1) * kBlockBins - 1);; --bin) {
    cut.at = bin_totals(view, digits, bin);
    if (bin == 0 || cut.above.*measure + cut.at.*measure >= target) return bin;
    add(cut.above, cut.at);
  }
}

template <typename T>
static inline Cut find_cut(const View& view, const Digits& high, uint64_t RowTotals::* measure, uint64_t target,
                           FilterScratch& scratch) {
  Cut cut{};
  const uint32_t bin = search(view, high, measure, target, cut);
  if (kOneTable<T>) {
    cut.logit = logit_of_key<ScalarMath>(high.key_of<ScalarMath>(bin));
    return cut;
  }
  const Digits low{scratch.low_counts, nullptr, scratch.low_blocks, true, bin};
  tabulate<T>(view, low);
  cut.logit = logit_of_key<ScalarMath>(low.key_of<ScalarMath>(search(view, low, measure, target, cut)));
  return cut;
}

// One past the id of the `count`-th token, in id order, whose logit is `logit`.
template <typename T>
static inline int64_t end_of_ties(const LogitRow& row, float logit, uint64_t count) {
  for (int64_t t = 0; t < row.vocab; t += kLanes) {
    uint32_t lanes = lane_bits(load_logits<T>(row, t) == splat(logit));
    for (; lanes != 0; lanes &= lanes - 1) {
      if (--count == 0) return t + __builtin_ctz(lanes) + 1;
    }
  }
  return row.vocab;
}

template <typename T>
static inline Filter find_filter(const LogitRow& row, const Law& law, const Scale& scale, FilterScratch& scratch) {
  Filter filter;
  filter.min_x = min_p_bound(law.min_p);
  const bool by_mass = law.top_p < 1.0f;
  const bool by_count = law.top_k > 0 && law.top_k < row.vocab;
  if (!by_mass && !by_count) return filter;

  const View view{row, scale, law.joint ? -kInfinity : filter.min_x, by_mass};
  uint64_t* masses = kOneTable<T> || !by_mass ? nullptr : scratch.high_masses;
  const Digits high{scratch.high_counts, masses, scratch.high_blocks, false, 0};
  tabulate<T>(view, high);
  RowTotals left{0, 0};
  for (int block = 0; block < kBlocks; ++block) add(left, high.blocks[block]);
  if (by_count && static_cast<uint64_t>(law.top_k) < left.count) {
    const Cut cut = find_cut<T>(view, high, &RowTotals::count, static_cast<uint64_t>(law.top_k), scratch);
    filter.min_logit = cut.logit;
    if (!law.joint) {
      left = cut.above;
      add(left, cut.at);
    }
  }
  if (by_mass) {
    const uint64_t needed = top_p_mass(law.top_p, left.mass);
    const Cut cut = find_cut<T>(view, high, &RowTotals::mass, needed, scratch);
    if (cut.logit >= filter.min_logit) {
      filter.min_logit = cut.logit;
      const uint64_t ties = ceil_div(needed - cut.above.mass, cut.at.mass / cut.at.count);
      if (ties < cut.at.count) filter.tie_end = end_of_ties<T>(row, cut.logit, ties);
    }
  }
  return filter;
}

// Which of the tokens begin .. begin + kLanes - 1 the filter keeps; x is their scaled logit.
static inline vint kept_lanes(const Filter& filter, vfloat logit, vfloat x, int64_t begin) {
  const int64_t ties = clamp_to<int64_t>(filter.tie_end - begin, 0, kLanes);
  const vint tied = (logit == filter.min_logit) & (lane_index() < static_cast<int32_t>(ties));
  return (x >= filter.min_x) & ((logit > filter.min_logit) | tied);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
