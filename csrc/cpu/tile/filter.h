// The filters' threshold on a row of logits, found in a few scans, without sorting it and without a copy of it: the
// peak, then a radix search over the logits' order.
#pragma once

#include "core/sampling.h"
#include "cpu/tile/logits.h"
#include "cpu/tile/math.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct Peak {
  float logit = -kInfinity;
  int64_t token = 0;  // the lowest id that has it
  bool has_nan = false;
};

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

// x = (logit - peak) / T.
struct Scale {
  float peak;
  float inverse_temperature;
  vfloat operator()(vfloat logit) const { return (logit - peak) * inverse_temperature; }
};

// The radix search reads a logit's 32-bit order key from the top in three digits.
constexpr int kLevels = 3;
constexpr int kShift[kLevels] = {21, 10, 0};
constexpr int kBins = 2048;
constexpr int kMinusInfinityBin = 0x007fffff >> kShift[0];  // nothing else but -inf is there or below

struct Totals {
  uint64_t count;
  uint64_t mass;
  void add(const Totals& other) {
    count += other.count;
    mass += other.mass;
  }
};

struct Histogram {
  Totals bins[kBins];
};

// What one search sees of a row: tokens with x below `min_x` read as -inf; masses are counted where `weighted`.
struct View {
  const LogitRow& row;
  Scale scale;
  float min_x;
  bool weighted;
};

// Totals by digit `level` of the tokens whose higher digits are `prefix`.
template <typename T>
static inline void fill(const View& view, int level, uint32_t prefix, Histogram& histogram) {
  std::memset(&histogram, 0, sizeof(histogram));
  constexpr uint32_t kAllLanes = static_cast<uint32_t>((uint64_t{1} << kLanes) - 1);
  const int digit_mask = level == 0 ? kBins - 1 : (1 << (kShift[level - 1] - kShift[level])) - 1;
  for (int64_t t = 0; t < view.row.vocab; t += kLanes) {
    vfloat logit = load_logits<T>(view.row, t);
    vfloat x = view.scale(logit);
    const vint inside = x >= view.min_x;
    logit = select(inside, logit, splat(-kInfinity));
    const vuint key = order_key<VectorMath>(logit);
    uint32_t lanes = kAllLanes;
    if (level > 0) lanes = lane_bits((key >> kShift[level - 1]) == prefix);
    if (lanes == 0) continue;
    uint32_t digits[kLanes], weights[kLanes] = {};
    const vuint digit = (key >> kShift[level]) & static_cast<uint32_t>(digit_mask);
    std::memcpy(digits, &digit, sizeof(digits));
    if (view.weighted) {
      x = select(inside, x, splat(-kInfinity));
      const vuint weight = weight_of<VectorMath>(x);
      std::memcpy(weights, &weight, sizeof(weights));
    }
    for (; lanes != 0; lanes &= lanes - 1) {
      const int i = __builtin_ctz(lanes);
      Totals& bin = histogram.bins[digits[i]];
      bin.count += 1;
      bin.mass += weights[i];
    }
  }
}

// The largest logit such that the tokens at or above it reach `target` in `measure`.
struct Cut {
  float logit = -kInfinity;
  Totals above{};
  Totals at{};
};

template <typename T>
static inline Cut find_cut(const View& view, const Histogram& top, uint64_t Totals::* measure, uint64_t target) {
  Cut cut;
  Histogram lower;
  uint32_t prefix = 0;
  for (int level = 0; level < kLevels; ++level) {
    if (level > 0) fill<T>(view, level, prefix, lower);
    const Histogram& histogram = level == 0 ? top : lower;
    int bin = level == 0 ? kBins - 1 : (1 << (kShift[level - 1] - kShift[level])) - 1;
    while (bin > 0 && cut.above.*measure + histogram.bins[bin].*measure < target) cut.above.add(histogram.bins[bin--]);
    if (level == 0 && bin <= kMinusInfinityBin) return cut;
    prefix = level == 0 ? bin : (prefix << (kShift[level - 1] - kShift[level])) | bin;
    cut.at = histogram.bins[bin];
  }
  cut.logit = logit_of_key(prefix);
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
static inline Filter find_filter(const LogitRow& row, const Law& law, const Scale& scale) {
  Filter filter;
  filter.min_x = min_p_bound(law.min_p);
  const bool by_mass = law.top_p < 1.0f;
  const bool by_count = law.top_k > 0 && law.top_k < row.vocab;
  if (!by_mass && !by_count) return filter;

  const View view{row, scale, law.joint ? -kInfinity : filter.min_x, by_mass};
  Histogram histogram;
  fill<T>(view, 0, 0, histogram);
  Totals left{};
  for (int bin = kMinusInfinityBin + 1; bin < kBins; ++bin) left.add(histogram.bins[bin]);
  if (by_count && static_cast<uint64_t>(law.top_k) < left.count) {
    const Cut cut = find_cut<T>(view, histogram, &Totals::count, static_cast<uint64_t>(law.top_k));
    filter.min_logit = cut.logit;
    if (!law.joint) {
      left = cut.above;
      left.add(cut.at);
    }
  }
  if (by_mass) {
    const uint64_t needed = top_p_mass(law.top_p, left.mass);
    const Cut cut = find_cut<T>(view, histogram, &Totals::mass, needed);
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
