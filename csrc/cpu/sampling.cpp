// Draws a token from a row of logits in a few scans of the row, without sorting it and without a copy of it: the peak,
// the filters' threshold, the race of the kept tokens' noise.
#include "cpu/isa.h"
#include "cpu/tile/filter.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// The kept token with the largest x + noise, the lowest id on ties.
template <typename T>
static inline int64_t race(const LogitRow& row, const Scale& scale, const Filter& filter, uint64_t seed,
                           int64_t position) {
  constexpr int kGroup = 4 * kLanes;  // one Philox block a lane
  float best = -kInfinity;
  int64_t winner = 0;
  for (int64_t begin = 0; begin < row.vocab; begin += kGroup) {
    vfloat x[4];
    vfloat most = splat(-kInfinity);
    for (int j = 0; j < 4; ++j) {
      x[j] = splat(-kInfinity);
      const int64_t t = begin + j * kLanes;
      if (t >= row.vocab) continue;
      const vfloat logit = load_logits<T>(row, t);
      x[j] = scale(logit);
      x[j] = select(kept_lanes(filter, logit, x[j], t), x[j], splat(-kInfinity));
      most = max(most, x[j]);
    }
    if (lane_bits(most + kMaxGumbel > best) == 0) continue;
    vuint words[4];
    const vuint block = bits<vuint>(lane_index()) + static_cast<uint32_t>(begin / 4);
    philox<VectorMath>(seed, position, block, RandomUse::kGumbel, words);
    interleave_blocks(words);
    for (int j = 0; j < 4; ++j) {
      if (lane_bits(x[j] + gumbel_bound<VectorMath>(words[j]) > best) == 0) continue;
      const vfloat score = x[j] + gumbel_of_word<VectorMath>(words[j]);
      for (int i = 0; i < kLanes; ++i) {
        if (!(score[i] > best)) continue;
        best = score[i];
        winner = begin + j * kLanes + i;
      }
    }
  }
  return winner;
}

template <typename T>
static inline Draw draw(const LogitRow& row, const Law& law, uint64_t seed, int64_t position, FilterScratch& scratch) {
  const Peak peak = find_peak<T>(row);
  if (law.temperature == 0.0f) return {peak.token, peak.has_nan || peak.logit == -kInfinity};
  if (peak.logit == -kInfinity) return {race<UniformLogit>(row, {0.0f, 1.0f}, Filter{}, seed, position), true};
  const Scale scale{peak.logit, inverse_temperature(law.temperature)};
  return {race<T>(row, scale, find_filter<T>(row, law, scale, scratch), seed, position), peak.has_nan};
}

Draw draw_token(const LogitRow& row, const Law& law, uint64_t seed, int64_t position, FilterScratch& scratch) {
  switch (row.dtype) {
    case DType::kFloat16:
      return draw<Float16>(row, law, seed, position, scratch);
    case DType::kBFloat16:
      return draw<BFloat16>(row, law, seed, position, scratch);
    default:
      return draw<float>(row, law, seed, position, scratch);
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
