// Draws a token from a row of logits in a few scans, without sorting or copying the row: the peak, the filters'
// threshold, the race of the kept tokens' noise.
#include "cpu/isa.h"
#include "cpu/isa/logits/race.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

template <typename T>
static inline Draw draw(const LogitRow& row, const Sampling& sampling, uint64_t seed, int64_t position,
                        FilterScratch& scratch) {
  const Peak peak = find_peak<T>(row, scratch.peaks);
  if (sampling.temperature == 0.0f) return {peak.token, peak.has_nan || peak.logit == -kInfinity};
  if (peak.logit == -kInfinity)
    return {race<UniformLogit>(row, {0.0f, 1.0f}, Filter{}, nullptr, seed, position).token, true};
  const Scale scale{peak.logit, inverse_temperature(sampling.temperature)};
  const Filter filter = find_filter<T>(row, sampling, scale, scratch);
  return {race<T>(row, scale, filter, scratch.peaks, seed, position).token, peak.has_nan != 0};
}

Draw draw_token(const LogitRow& row, const Sampling& sampling, uint64_t seed, int64_t position,
                FilterScratch& scratch) {
  return with_logits(row.dtype, [&]<typename T>() { return draw<T>(row, sampling, seed, position, scratch); });
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
