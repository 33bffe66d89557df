// Log-probabilities and ranks of tokens, see core/logprobs.h.
#include "core/logprobs.h"

#include "cpu/isa.h"
#include "cpu/isa/logits/mass_sums.h"
#include "cpu/isa/logits/options.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

double top_tokens(const LogitRow& row, int32_t k, bool with_sum, int64_t* tokens, float* logits);

namespace {

int64_t count_reaching(const RowDistribution& distribution, float logit) {
  return with_logits(distribution, [&]<typename T>() {
    int64_t count = 0;
    for (int64_t t = 0; t < distribution.row.vocab; t += kLanes) {
      const vint reaching = load_logits<T>(distribution.row, t) >= splat(logit);
      count += popcount32(lane_bits(reaching & lanes_before(distribution.row.vocab, t)));
    }
    return count;
  });
}

}  // namespace

void token_logprobs(const TokenLogprobsParams& p, int64_t r, RowScratch& scratch) {
  const int64_t n = logprob_row(p, r), token = logprob_token(p, r);
  write_no_logprobs(p, r, 0, 1);
  if (n < 0) return;
  const LogitRow row = row_under(p.options, r, r, logit_row(p.logits, n), *scratch.adjusted);
  const Sampling sampling = logprob_sampling(p, r);
  const RowDistribution distribution = find_distribution(row, sampling, scratch.filter);
  const float* peaks = distribution.uniform ? nullptr : scratch.filter.peaks;
  const double total = sum_distribution(distribution, peaks, scratch.residuals, scratch.block.target);
  if (token >= 0) {
    const float logit = with_logits(distribution, [&]<typename T>() { return logit_at<T>(distribution.row, token); });
    p.logprobs[r] = logprob_of(distribution, total, token, logit);
    p.ranks[r] = count_reaching(distribution, logit);
  }
  int64_t* tokens = p.top_tokens + r * p.top_n;
  float* logprobs = p.top_logprobs + r * p.top_n;
  if (distribution.uniform) {
    for (int32_t i = 0; i < p.top_n; ++i) {
      tokens[i] = i;
      logprobs[i] = logprob_of(distribution, total, i, 0.0f);
    }
    return;
  }
  if (p.top_n > 0) top_tokens(row, p.top_n, false, tokens, logprobs);
  for (int32_t i = 0; i < p.top_n && tokens[i] >= 0; ++i) {
    logprobs[i] = logprob_of(distribution, total, tokens[i], logprobs[i]);
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
