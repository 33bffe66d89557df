// Draws a token in a few scans, without sorting or copying the row.
// peak -> thresholds of top-k and min-p -> race -> top-p test of the winner, else race without it
#include "cpu/isa.h"
#include "cpu/isa/logits/options.h"
#include "cpu/isa/logits/race.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

template <typename T>
class TopP {
 public:
  TopP(const View& view, float top_p) : view_(view), top_p_(top_p) {}

  bool keeps(int32_t token, float logit) {
    const uint64_t before = mass_of_tokens<T>(view_, logit, [&](vfloat other, int64_t t) {
      return (other > splat(logit)) | ((other == splat(logit)) & lanes_before(token, t));
    });
    if (before == 0 || before < top_p_mass(top_p_, mass_of_peaks())) return true;
    if (mass_ == 0) mass_ = mass_of_all<T>(view_);
    return before < top_p_mass(top_p_, mass_);
  }

 private:
  // Returns a lower bound.
  uint64_t mass_of_peaks() const {
    WeightSum sum;
    for (int64_t t = 0; t < view_.row.vocab; t += kPeakBlock) {
      if (has_peaks<T>(view_.row, t)) sum.add(view_.weights(peaks_at(view_.peaks, t)));
    }
    return sum.whole();
  }

  const View view_;
  const float top_p_;
  uint64_t mass_ = 0;
};

template <typename T>
static inline Draw draw(const LogitRow& row, const Sampling& sampling, uint64_t seed, int64_t position,
                        FilterScratch& scratch) {
  const Peak peak = find_peak<T>(row, scratch.peaks);
  if (sampling.temperature == 0.0f) return {peak.token, peak.has_nan || peak.logit == -kInfinity};
  if (peak.logit == -kInfinity) {
    return {race<UniformLogit>(row, {0.0f, 1.0f}, Filter{}, nullptr, seed, position).token, true};
  }
  const Scale scale{peak.logit, inverse_temperature(sampling.temperature)};
  // Tests top-p on the winner. A rejected winner excludes all tokens after it in order.
  Sampling before_race = sampling;
  const bool asks = cuts_mass_of_all(sampling, row.vocab);
  if (asks) before_race.top_p = 1.0f;
  Filter filter = find_filter<T>(row, before_race, scale, scratch);
  TopP<T> top_p({row, scale, sampling.joint ? -kInfinity : filter.min_x, scratch.peaks}, sampling.top_p);
  while (true) {
    const int32_t token = race<T>(row, scale, filter, scratch.peaks, seed, position).token;
    const float logit = logit_at<T>(row, token);
    if (!asks || top_p.keeps(token, logit)) return {token, peak.has_nan != 0};
    filter.min_logit = logit;
    filter.tie_end = token;
  }
}

Draw draw_token(const LogitRow& row, const Sampling& sampling, uint64_t seed, int64_t position,
                FilterScratch& scratch) {
  return with_logits(row.dtype, [&]<typename T>() { return draw<T>(row, sampling, seed, position, scratch); });
}

void sample(const SampleParams& p, int64_t r, RowScratch& scratch) {
  const LogitRow row = row_under(p.options, r, r, logit_row(p.logits, r), *scratch.adjusted);
  p.tokens[r] = draw_token(row, sampling_of(p.sampling, r), static_cast<uint64_t>(p.seeds[r]),
                           integer_at(p.positions, r), scratch.filter)
                    .token;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
