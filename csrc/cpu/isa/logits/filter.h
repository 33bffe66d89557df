// The filters' threshold on a row of logits, found in a few scans, without a copy of it: the peak, then either the few
// largest logits, sorted, or a radix search over the logits' order.
#pragma once

#include "core/sampling.h"
#include "cpu/isa/logits/peak.h"
#include "cpu/isa/tile/math.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// A logit below which the filter keeps no token.
static inline float least_kept(const Filter& filter, const Scale& scale) {
  if (filter.min_x == -kInfinity) return filter.min_logit;
  const double peak = scale.peak, below = static_cast<double>(filter.min_x) / scale.inverse_temperature;
  const float least = static_cast<float>(peak + 1.001 * below - 1e-6 * (peak < 0.0 ? -peak : peak));
  return least > filter.min_logit ? least : filter.min_logit;
}

// Whether the block may hold a token that the filter keeps and that has a mass.
static inline bool may_have_mass(const float* peaks, int64_t t, const Filter& filter, const Scale& scale) {
  const vfloat x = scale(peaks_at(peaks, t));
  return reaches(peaks, t, filter.min_logit) && lane_bits((x >= splat(filter.min_x)) & has_mass(x)) != 0;
}

// The threshold is found by radix search: tokens are counted by the high half of their logits' 32-bit order key, then,
// among those with the threshold's high half, by the low half. bfloat16 logits have no low half: one table is enough.
// Tokens below a logit that the threshold cannot be below are not counted, so that usually few are.
template <typename T>
constexpr bool kOneTable = std::is_same_v<T, BFloat16>;
constexpr int kFewLogits = 256;                 // more are not sorted
constexpr uint32_t kMinusInfinityBin = 0x007f;  // holds -inf; lower bins hold nothing

// What one search sees of a row: tokens with x below `min_x` read as -inf, and tokens with logits below `least` are in
// no table. If `weighted`, masses are added as well.
struct View {
  const LogitRow& row;
  float* peaks;
  Scale scale;
  float min_x;
  float least;
  bool weighted;
};

// The table of one half of the key. Unless a low half follows, a bin is one logit and its mass is its count times one
// weight. Only other tables need `masses`.
struct Digits {
  uint32_t* counts;
  uint64_t* masses;  // null: each bin is one logit
  RowTotals* blocks;
  int first_block;  // earlier blocks are not used
  bool low;
  uint32_t prefix;  // if `low`: the high half of all keys

  template <typename M>
  typename M::Uint key_of(typename M::Uint bin) const {
    if (low) return bin | (prefix << 16);
    return (bin << 16) | (((bin >> 15) - 1u) & 0xffffu);  // the keys of negative logits are complements
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

static inline void clear(const Digits& digits) {
  const int first = digits.first_block * kBlockBins;
  std::memset(digits.counts + first, 0, (kBins - first) * sizeof(*digits.counts));
  if (digits.masses != nullptr) std::memset(digits.masses + first, 0, (kBins - first) * sizeof(*digits.masses));
}

// Enters the tokens whose bit in `lanes` is set.
static inline void enter(const Digits& digits, vuint key, vfloat x, uint32_t lanes) {
  const vuint bin = digits.low ? key & 0xffffu : key >> 16;
  const vuint weight = digits.masses != nullptr ? weight_of<VectorMath>(x) : vuint{};
  for (; lanes != 0; lanes &= lanes - 1) {
    const int i = __builtin_ctz(lanes);
    ++digits.counts[bin[i]];
    if (digits.masses != nullptr) digits.masses[bin[i]] += weight[i];
  }
}

// The mass of all tokens, added in parts so that no lane overflows. A block whose tokens are all light needs one part.
struct MassSum {
  static constexpr float kLight = -6.0f;  // x
  vuint low{}, high{};
  uint64_t mass = 0;

  void add(vuint weight, bool light) {
    if (light) {
      low += weight;
    } else {
      low += weight & 0xffffu;
      high += weight >> 16;
    }
  }
  void end_block() {
    static_assert(kPeakBlock <= 1 << 16);
    for (int i = 0; i < kLanes; ++i) mass += low[i] + (uint64_t{high[i]} << 16);
    low = high = vuint{};
  }
};

// Fills the table; returns the mass of all tokens, whatever their logits, if `with_sum`.
template <typename T>
static inline uint64_t tabulate(const View& view, const Digits& digits, bool with_sum) {
  clear(digits);
  const float least = digits.low ? logit_of_key<ScalarMath>(digits.prefix << 16) : view.least;
  MassSum sum;
  BlockReader<T> logits(view.row);
  for (int64_t block = 0; block < view.row.vocab; block += kPeakBlock) {
    if (!with_sum && !reaches(view.peaks, block, least)) continue;
    const int64_t end = min_of(block + kPeakBlock, view.row.vocab);
    const bool light = lane_bits(view.scale(peaks_at(view.peaks, block)) >= MassSum::kLight) == 0;
    logits.open(block, with_sum ? -kInfinity : least);
    for (int64_t t = block; t < end; t += kLanes) {
      const vfloat logit = logits(t);
      const vfloat x = view.scale(logit);
      const vint seen = x >= splat(view.min_x);
      if (with_sum) sum.add(weight_of<VectorMath>(x) & bits<vuint>(seen), light);
      const vuint key = order_key<VectorMath>(logit);
      const vint in = digits.low ? (key >> 16) == splat(digits.prefix) : logit >= splat(least);
      const uint32_t lanes = lane_bits(in & seen);
      if (lanes != 0) enter(digits, key, x, lanes);
    }
    if (with_sum) sum.end_block();
  }
  if (!digits.low && digits.first_block == 0) {
    std::memset(digits.counts, 0, (kMinusInfinityBin + 1) * sizeof(*digits.counts));
    if (digits.masses != nullptr) std::memset(digits.masses, 0, (kMinusInfinityBin + 1) * sizeof(*digits.masses));
  }
  for (int block = digits.first_block; block < kBlocks; ++block) {
    digits.blocks[block] = block_totals(view, digits, block);
  }
  return sum.mass;
}

// The largest logit such that the tokens at or above it reach `target` in `measure`.
struct Cut {
  float logit;
  RowTotals above{};
  RowTotals at{};
};

// Finds the bin of the cut and adds up what lies above it, from the top. The whole table must reach `target`.
static inline uint32_t search(const View& view, const Digits& digits, uint64_t RowTotals::* measure, uint64_t target,
                              Cut& cut) {
  int block = kBlocks - 1;
  for (; block > digits.first_block && cut.above.*measure + digits.blocks[block].*measure < target; --block) {
    add(cut.above, digits.blocks[block]);
  }
  for (uint32_t bin = static_cast<uint32_t>((block + 1) * kBlockBins - 1);; --bin) {
    cut.at = bin_totals(view, digits, bin);
    if (static_cast<int>(bin) == digits.first_block * kBlockBins || cut.above.*measure + cut.at.*measure >= target)
      return bin;
    add(cut.above, cut.at);
  }
}

// The largest logits of a row, in descending order.
struct FewLogits {
  float values[kFewLogits];
  int size = 0;

  bool insert(vfloat logits, uint32_t lanes) {
    if (size + static_cast<int>(popcount32(lanes)) > kFewLogits) return false;
    for (; lanes != 0; lanes &= lanes - 1) {
      const float value = logits[__builtin_ctz(lanes)];
      int at = size++;
      for (; at > 0 && values[at - 1] < value; --at) values[at] = values[at - 1];
      values[at] = value;
    }
    return true;
  }

  // As search(), given what lies above them all.
  void find_cut(const View& view, uint64_t RowTotals::* measure, uint64_t target, Cut& cut) const {
    for (int first = 0, next = 0; first < size; first = next) {
      while (next < size && values[next] == values[first]) ++next;
      cut.logit = values[first];
      const uint64_t equal = static_cast<uint64_t>(next - first);
      cut.at = {equal, view.weighted ? equal * weight_of<ScalarMath>(view.scale(cut.logit)) : 0};
      if (next == size || cut.above.*measure + cut.at.*measure >= target) return;
      add(cut.above, cut.at);
    }
  }
};

// Finds the cut among the `count` tokens of the table whose keys begin with `high`.
template <typename T>
static inline void find_cut_of_few(const View& view, uint32_t high, int count, uint64_t RowTotals::* measure,
                                   uint64_t target, Cut& cut) {
  FewLogits few;
  const float least = logit_of_key<ScalarMath>(high << 16);
  BlockReader<T> logits(view.row);
  for (int64_t block = 0; block < view.row.vocab && few.size < count; block += kPeakBlock) {
    if (!reaches(view.peaks, block, least)) continue;
    const int64_t end = min_of(block + kPeakBlock, view.row.vocab);
    logits.open(block, least);
    for (int64_t t = block; t < end; t += kLanes) {
      const vfloat logit = logits(t);
      const vint counted = (logit >= splat(view.least)) & (view.scale(logit) >= splat(view.min_x));
      few.insert(logit, lane_bits(((order_key<VectorMath>(logit) >> 16) == splat(high)) & counted));
    }
  }
  few.find_cut(view, measure, target, cut);
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
  if (cut.at.count > 0 && cut.at.count <= kFewLogits) {
    find_cut_of_few<T>(view, bin, static_cast<int>(cut.at.count), measure, target, cut);
    return cut;
  }
  const Digits low{scratch.low_counts, nullptr, scratch.low_blocks, 0, true, bin};
  tabulate<T>(view, low, false);
  cut.logit = logit_of_key<ScalarMath>(low.key_of<ScalarMath>(search(view, low, measure, target, cut)));
  return cut;
}

// One past the id of the `count`-th token, in id order, whose logit is `logit`.
template <typename T>
static inline int64_t end_of_ties(const LogitRow& row, float logit, uint64_t count) {
  for (int64_t t = 0; t < row.vocab; t += kLanes) {
    const vfloat logits = load_if<T>(row, t, [&](vfloat bound) { return bound >= splat(logit); });
    uint32_t lanes = lane_bits(logits == splat(logit));
    for (; lanes != 0; lanes &= lanes - 1) {
      if (--count == 0) return t + __builtin_ctz(lanes) + 1;
    }
  }
  return row.vocab;
}

// A logit that at least `count` tokens reach, because `count` of the peaks do; -inf if there are fewer peaks.
static inline float reached_by(const float* peaks, int64_t vocab, int64_t count) {
  const int64_t size = ceil_div<int64_t>(vocab, kPeakBlock) * kLanes;
  if (count > size) return -kInfinity;
  uint32_t key = 0;  // the largest key that `count` peaks reach, found bit by bit
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    int64_t reached = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      reached += popcount32(lane_bits(order_key<VectorMath>(load(peaks + i)) >= splat(key | bit)));
    }
    if (reached >= count) key |= bit;
  }
  return logit_of_key<ScalarMath>(key);
}

// The same where peaks may be bounds: blocks that matter are looked at first.
template <typename T>
static inline float reached_by(const LogitRow& row, float* peaks, int64_t count) {
  while (true) {
    const float reached = reached_by(peaks, row.vocab, count);
    if constexpr (!std::is_same_v<T, AdjustedLogit>) return reached;
    bool are_exact = true;
    for (int64_t t = 0; t < row.vocab; t += kPeakBlock) {
      const int64_t block = t / kPeakBlock;
      AdjustedRow& a = adjusted_row(row);
      if (a.exactness[block] == Exactness::kPeaks || !reaches(peaks, t, reached)) continue;
      find_block_peaks(a, block, peaks, Exactness::kPeaks);
      are_exact = false;
    }
    if (are_exact) return reached;
  }
}

// Gathers the logits that reach view.least, unless they are too many.
template <typename T>
static inline bool gather(const View& view, FewLogits& few) {
  const auto reach = [&](vfloat logit) {
    return (logit >= splat(view.least)) & (view.scale(logit) >= splat(view.min_x));
  };
  int64_t vectors[kFewLogits];
  int size = 0;
  BlockReader<T> logits(view.row);
  for (int64_t block = 0; block < view.row.vocab; block += kPeakBlock) {
    if (!reaches(view.peaks, block, view.least)) continue;
    const int64_t end = min_of(block + kPeakBlock, view.row.vocab);
    logits.open(block, view.least);
    for (int64_t group = block; group < end; group += 4 * kLanes) {
      if (!logits.any_may_reach(group, 4)) continue;
      for (int64_t t = group; t < min_of(group + 4 * kLanes, end); t += kLanes) {
        if (!logits.may_reach(t)) continue;
        if (size == kFewLogits) return false;
        vectors[size++] = t;
        prefetch_penalties<T>(view.row, t);
      }
    }
  }
  for (int i = 0; i < size; ++i) {
    const vfloat logit = load_if<T>(view.row, vectors[i], [&](vfloat bound) { return bound >= splat(view.least); });
    if (!few.insert(logit, lane_bits(reach(logit)))) return false;
  }
  return true;
}

// A logit below which all tokens together have less than 1 - top_p of the peak's mass, even if rounding adds a half to
// each weight.
static inline float below_top_p(float top_p, int64_t vocab, const Scale& scale) {
  const float share = 0.99f * (1.0f - top_p) / static_cast<float>(vocab) - 0x1p-32f;
  if (share < kMinNormal) return -kInfinity;
  return static_cast<float>(static_cast<double>(scale.peak) +
                            static_cast<double>(log_exact<ScalarMath>(share)) / scale.inverse_temperature);
}

// Applies top-k and top-p. `left`: what they see of the row, where find_cut(measure, target) finds a cut.
template <typename T, typename FindCut>
static inline void cut_row(const LogitRow& row, const Sampling& sampling, RowTotals left, const FindCut& find_cut,
                           Filter& filter) {
  const uint64_t count = static_cast<uint64_t>(sampling.top_k);
  // If no more than top_k tokens are left, they end at the cut or are all tokens.
  if (sampling.top_k > 0 && sampling.top_k < row.vocab && count <= left.count) {
    const Cut cut = find_cut(&RowTotals::count, count);
    filter.min_logit = cut.logit;
    if (!sampling.joint) {
      left = cut.above;
      add(left, cut.at);
    }
  }
  if (sampling.top_p < 1.0f) {
    const uint64_t needed = top_p_mass(sampling.top_p, left.mass);
    const Cut cut = find_cut(&RowTotals::mass, needed);
    if (cut.logit >= filter.min_logit) {
      filter.min_logit = cut.logit;
      const uint64_t ties = ceil_div(needed - cut.above.mass, cut.at.mass / cut.at.count);
      if (ties < cut.at.count) filter.tie_end = end_of_ties<T>(row, cut.logit, ties);
    }
  }
}

// The filter where top_k is small and top-p sees no other tokens: the few largest logits are sorted. False where they
// are not enough or too many.
template <typename T>
static inline bool find_filter_of_few(const Sampling& sampling, View view, Filter& filter) {
  // Where bounds are counted, a few of them are above their logits.
  const int64_t spare = has_bounds<T>(view.row) ? sampling.top_k / 8 + 8 : 0;
  view.least = reached_by(view.peaks, view.row.vocab, sampling.top_k + spare);
  FewLogits few;
  if (view.least == -kInfinity || !gather<T>(view, few)) return false;
  if (few.size < sampling.top_k && view.scale(view.least) >= view.min_x) return false;
  RowTotals left{static_cast<uint64_t>(few.size), 0};
  for (int i = 0; view.weighted && i < few.size; ++i) left.mass += weight_of<ScalarMath>(view.scale(few.values[i]));
  const auto find_cut = [&](uint64_t RowTotals::* measure, uint64_t target) {
    Cut cut{};
    few.find_cut(view, measure, target, cut);
    return cut;
  };
  cut_row<T>(view.row, sampling, left, find_cut, filter);
  return true;
}

template <typename T>
static inline Filter find_filter(const LogitRow& row, const Sampling& sampling, const Scale& scale,
                                 FilterScratch& scratch) {
  Filter filter;
  filter.min_x = min_p_bound(sampling.min_p);
  const bool by_mass = sampling.top_p < 1.0f;
  const bool by_count = sampling.top_k > 0 && sampling.top_k < row.vocab;
  if (!by_mass && !by_count) return filter;

  const bool with_sum = by_mass && (sampling.joint || !by_count);
  View view{row, scratch.peaks, scale, sampling.joint ? -kInfinity : filter.min_x, kInfinity, by_mass};
  if (!with_sum && sampling.top_k <= kFewLogits / 2 && find_filter_of_few<T>(sampling, view, filter)) return filter;
  if (by_count) view.least = reached_by<T>(row, scratch.peaks, sampling.top_k);
  if (with_sum) view.least = min_of(view.least, below_top_p(sampling.top_p, row.vocab, scale));
  uint64_t* masses = kOneTable<T> || !by_mass ? nullptr : scratch.high_masses;
  const int first_block = static_cast<int>(order_key<ScalarMath>(view.least + 0.0f) >> 16) / kBlockBins;
  const Digits high{scratch.high_counts, masses, scratch.high_blocks, first_block, false, 0};
  const uint64_t mass = tabulate<T>(view, high, with_sum);
  RowTotals left{0, 0};
  for (int block = first_block; block < kBlocks; ++block) add(left, high.blocks[block]);
  if (with_sum) left.mass = mass;
  const auto cut = [&](uint64_t RowTotals::* measure, uint64_t target) {
    return find_cut<T>(view, high, measure, target, scratch);
  };
  cut_row<T>(row, sampling, left, cut, filter);
  return filter;
}

// Which of the tokens begin .. begin + kLanes - 1 the filter keeps; x is their scaled logit.
static inline vint kept_lanes(const Filter& filter, vfloat logit, vfloat x, int64_t begin) {
  const int64_t ties = clamp_to<int64_t>(filter.tie_end, begin, begin + kLanes) - begin;
  const vint tied = (logit == filter.min_logit) & (lane_index() < static_cast<int32_t>(ties));
  return (x >= filter.min_x) & ((logit > filter.min_logit) | tied);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
