// Threshold of the filters, without a copy of the row: lists tokens that may reach it, then bisects the list.
// threshold = max{logit: weight of all logits >= it reaches the target}
#pragma once

#include "core/sampling.h"
#include "cpu/isa/logits/peak.h"
#include "cpu/isa/tile/math.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Returns a lower bound of the kept logits.
static inline float least_kept(const Filter& filter, const Scale& scale) {
  if (filter.min_x == -kInfinity) return filter.min_logit;
  // Smaller distances to the peak may have an x that rounds to 0.
  const double peak = scale.peak, below = (static_cast<double>(filter.min_x) - 0x1p-120) / scale.inverse_temperature;
  const float least = static_cast<float>(peak + 1.001 * below - 1e-6 * (peak < 0.0 ? -peak : peak));
  return least > filter.min_logit ? least : filter.min_logit;
}

struct View {
  const LogitRow& row;
  Scale scale;
  float min_x;
  const float* peaks;

  vint sees(vfloat logit) const { return (scale(logit) >= min_x) & (logit > splat(-kInfinity)); }
  vuint weights(vfloat logit) const { return weight_of<VectorMath>(scale(logit)) & bits<vuint>(sees(logit)); }
};

class WeightSum {
 public:
  void add(vuint weights) {
    const vulong pairs = bits<vulong>(weights);
    sums_ += (pairs & 0xffffffffu) + (pairs >> 32);
  }
  uint64_t whole() const {
    uint64_t sum = 0;
    for (int i = 0; i < kLanes / 2; ++i) sum += sums_[i];
    return sum;
  }

 private:
  vulong sums_{};
};

// Returns the mass of the tokens with `counts(logit, t)`, all of which reach `least`.
template <typename T, typename Counts>
static inline uint64_t mass_of_tokens(const View& view, float least, const Counts& counts) {
  WeightSum sum;
  BlockReader<T> logits(view.row);
  for (int64_t block = 0; block < view.row.vocab; block += kPeakBlock) {
    if (!reaches(view.peaks, block, least)) continue;
    if (lane_bits(view.scale(peaks_at(view.peaks, block)) >= kWeightless) == 0) continue;
    const int64_t end = min_of<int64_t>(block + kPeakBlock, view.row.vocab);
    logits.open(block, least);
    for (int64_t t = block; t < end; t += kLanes) {
      const vfloat logit = logits(t);
      sum.add(view.weights(logit) & bits<vuint>(counts(logit, t)));
    }
  }
  return sum.whole();
}

template <typename T>
static inline uint64_t mass_of_all(const View& view) {
  return mass_of_tokens<T>(view, -kInfinity, [](vfloat logit, int64_t) { return logit == logit; });
}

// Unordered, padded with smaller logits to a whole vector.
struct LogitList {
  const float* values;
  int64_t size;
};

// Sums weights(logit) over logits >= least.
template <typename Weights>
static inline uint64_t sum_of_list(const LogitList& list, float least, const Weights& weights) {
  WeightSum sum;
  for (int64_t i = 0; i < list.size; i += kLanes) {
    const vfloat logit = load(list.values + i);
    sum.add(weights(logit) & bits<vuint>(logit >= splat(least)));
  }
  return sum.whole();
}

// The threshold, the weight above it, and its number of ties.
struct Cut {
  float logit;
  uint64_t above = 0;
  int64_t ties = 0;
};

// Requires logits in [least, most] with a total of at least `target`. `left`: room for the list.
template <typename Weights>
static inline Cut find_cut(LogitList list, float least, float most, uint64_t target, float* left,
                           const Weights& weights) {
  Cut cut{least};
  bool by_key = false;  // every second time: at most 64 steps
  do {
    const uint32_t low = order_key<ScalarMath>(cut.logit), high = order_key<ScalarMath>(most);
    float middle = 0.5f * cut.logit + 0.5f * most;
    if (by_key || middle <= cut.logit) middle = logit_of_key<ScalarMath>(low + (high - low + 1) / 2);
    by_key = !by_key;
    const uint64_t upper = sum_of_list(list, middle, weights);
    const bool reached = cut.above + upper >= target;
    if (!reached) cut.above += upper;
    vfloat lowest = splat(-kInfinity), highest = lowest;  // negated
    int64_t size = 0;
    for (int64_t i = 0; i < list.size; i += kLanes) {
      const vfloat logit = load(list.values + i);
      const vint is_left = (logit >= splat(cut.logit)) & ((logit >= splat(middle)) == splat(reached ? -1 : 0));
      lowest = max(select(is_left, -logit, lowest), lowest);
      highest = max(select(is_left, logit, highest), highest);
      size += compress(left + size, logit, lane_bits(is_left));
    }
    store(left + size, splat(-kInfinity));
    cut.logit = 0.0f - reduce_max(lowest);
    most = reduce_max(highest);
    list = {left, size};
  } while (cut.logit < most);
  cut.ties = list.size;
  return cut;
}

// The first `most` tokens of a logit in id order: their number, and the last id plus one.
struct Ties {
  int64_t count = 0, end = 0;
};
template <typename T>
static inline Ties ties_of(const LogitRow& row, float logit, int64_t most) {
  Ties ties;
  for (int64_t t = 0; t < row.vocab && ties.count < most; t += kLanes) {
    const vfloat logits = load_if<T>(row, t, [&](vfloat bound) { return bound >= splat(logit); });
    for (uint32_t lanes = lane_bits(logits == splat(logit)); lanes != 0 && ties.count < most; lanes &= lanes - 1) {
      ties = {ties.count + 1, t + __builtin_ctz(lanes) + 1};
    }
  }
  return ties;
}

// Returns a logit that at least `count` peaks reach; the least finite one if fewer are finite.
static inline float reached_by(const View& view, int64_t count, float* left) {
  const LogitList peaks{view.peaks, ceil_div<int64_t>(view.row.vocab, kPeakBlock) * kLanes};
  const auto one = [](vfloat) { return splat(1u); };
  const uint64_t target = static_cast<uint64_t>(count);
  if (sum_of_list(peaks, -kMaxFloat, one) < target) return -kMaxFloat;
  return find_cut(peaks, -kMaxFloat, view.scale.peak, target, left, one).logit;
}

// Returns a logit below which V tokens have less than 1 - top_p of the mass, even with weights rounded up by a half.
static inline float below_top_p(const View& view, float top_p, uint64_t mass) {
  const float of_peaks = static_cast<float>(mass) * 0x1p-31f / static_cast<float>(view.row.vocab);
  const float share = 0.99f * (1.0f - top_p) * of_peaks - 0x1p-32f;
  if (share < kMinNormal) return -kMaxFloat;
  return max_of(-kMaxFloat,
                static_cast<float>(static_cast<double>(view.scale.peak) +
                                   static_cast<double>(log_exact<ScalarMath>(share)) / view.scale.inverse_temperature));
}

template <typename T>
static inline LogitList list_logits(const View& view, float least, float* listed) {
  int64_t size = 0;
  BlockReader<T> logits(view.row);
  for (int64_t block = 0; block < view.row.vocab; block += kPeakBlock) {
    if (!reaches(view.peaks, block, least)) continue;
    const int64_t end = min_of<int64_t>(block + kPeakBlock, view.row.vocab);
    logits.open(block, least);
    for (int64_t group = block; group < end; group += 4 * kLanes) {
      if (!logits.any_may_reach(group, 4)) continue;
      for (int64_t t = group; t < min_of(group + 4 * kLanes, end); t += kLanes) {
        if (!logits.may_reach(t)) continue;
        const vfloat logit = logits(t);
        size += compress(listed + size, logit, lane_bits((logit >= splat(least)) & view.sees(logit)));
      }
    }
  }
  store(listed + size, splat(-kInfinity));
  return {listed, size};
}

// Returns true if top-p's total mass, of all tokens or of tokens above min-p, does not depend on top-k.
static inline bool cuts_mass_of_all(const Sampling& sampling, int64_t vocab) {
  return sampling.top_p < 1.0f && (sampling.joint || !sampling.cuts_by_count(vocab));
}

template <typename T>
static inline Filter find_filter(const LogitRow& row, const Sampling& sampling, const Scale& scale,
                                 FilterScratch& scratch) {
  Filter filter;
  filter.min_x = min_p_bound(sampling.min_p);
  const bool by_mass = sampling.top_p < 1.0f, of_all = cuts_mass_of_all(sampling, row.vocab);
  const int64_t top_k = sampling.cuts_by_count(row.vocab) ? sampling.top_k : 0;
  if (!by_mass && top_k == 0) return filter;
  const View view{row, scale, sampling.joint ? -kInfinity : filter.min_x, scratch.peaks};
  uint64_t mass = of_all ? mass_of_all<T>(view) : 0;
  const float enough = of_all ? below_top_p(view, sampling.top_p, mass) : kInfinity;
  float least = enough;
  LogitList list{};
  // Bounds may exceed their logits: list more.
  for (int64_t count = has_bounds<T>(row) ? top_k + top_k / 8 + 8 : top_k;; count *= 2) {
    if (top_k > 0) least = min_of(enough, reached_by(view, count, scratch.left));
    list = list_logits<T>(view, least, scratch.listed);
    if (list.size >= top_k || least == -kMaxFloat || scale(least) < view.min_x) break;
  }
  const auto one = [](vfloat) { return splat(1u); };
  const auto weights = [&](vfloat logit) { return view.weights(logit); };
  // If at most top_k tokens are listed, they end at the cut or are all tokens.
  if (top_k > 0 && top_k <= list.size) {
    filter.min_logit = find_cut(list, least, scale.peak, static_cast<uint64_t>(top_k), scratch.left, one).logit;
    if (!sampling.joint) least = filter.min_logit;
  }
  if (!by_mass) return filter;
  if (!of_all) mass = sum_of_list(list, least, weights);
  const uint64_t needed = top_p_mass(sampling.top_p, mass);
  const Cut cut = find_cut(list, least, scale.peak, needed, scratch.left, weights);
  if (cut.logit < filter.min_logit) return filter;
  filter.min_logit = cut.logit;
  const uint64_t of_each = weight_of<ScalarMath>(scale(cut.logit));
  const int64_t ties = static_cast<int64_t>(ceil_div(needed - cut.above, of_each));
  if (ties < cut.ties) filter.tie_end = ties_of<T>(row, cut.logit, ties).end;
  return filter;
}

static inline vint kept_lanes(const Filter& filter, vfloat logit, vfloat x, int64_t begin) {
  const vint tied = (logit == filter.min_logit) & lanes_before(filter.tie_end, begin);
  return (x >= filter.min_x) & ((logit > filter.min_logit) | tied);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
