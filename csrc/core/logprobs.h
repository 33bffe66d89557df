// Log-probabilities and ranks of tokens.
// logprob(token) = x(token) - log(sum of exp(x)), x = (logit - max) / temperature
#pragma once

#include "core/options.h"

namespace pagedtree {

struct TokenLogprobsParams {
  LogitsParams logits;      // N rows
  SamplingParams sampling;  // of R; temperature null: temperature 1, no filters
  OptionsParams options;    // of R
  Integers tokens;          // [R]
  Integers rows;            // [R] row of logits; data null: row r
  float* logprobs;          // [R] out
  int64_t* ranks;           // [R] out
  int64_t* top_tokens;      // [R, top_n] out
  float* top_logprobs;      // [R, top_n] out
  int64_t num_tokens;       // R
  int32_t top_n;
};

// Returns -1 if out of range.
PT_HOST_DEVICE int64_t logprob_row(const TokenLogprobsParams& p, int64_t r) {
  const int64_t row = p.rows.data == nullptr ? r : integer_at(p.rows, r);
  return row >= 0 && row < p.logits.num_rows ? row : -1;
}

// Returns -1 if out of the vocabulary.
PT_HOST_DEVICE int64_t logprob_token(const TokenLogprobsParams& p, int64_t r) {
  const int64_t token = integer_at(p.tokens, r);
  return token >= 0 && token < p.logits.vocab ? token : -1;
}

PT_HOST_DEVICE Sampling logprob_sampling(const TokenLogprobsParams& p, int64_t r) {
  return p.sampling.temperature == nullptr ? Sampling{1.0f, 0, 1.0f, 0.0f, false} : sampling_of(p.sampling, r);
}

// Uses x, not the mass, so that tokens whose mass underflows stay exact.
PT_HOST_DEVICE float logprob_of(const RowDistribution& distribution, double total, int64_t token, float logit) {
  if (distribution.uniform) logit = 0.0f;
  const float x = distribution.scale(logit);
  if (logit == -kInfinity || !distribution.filter.keeps(token, logit, x)) return -kInfinity;
  return x - log_exact<ScalarMath>(static_cast<float>(total)) + 0.0f;  // never -0
}

PT_HOST_DEVICE void write_no_logprobs(const TokenLogprobsParams& p, int64_t r, int64_t first, int64_t step) {
  if (first == 0) {
    p.logprobs[r] = -kInfinity;
    p.ranks[r] = 0;
  }
  for (int64_t i = first; i < p.top_n; i += step) {
    p.top_tokens[r * p.top_n + i] = -1;
    p.top_logprobs[r * p.top_n + i] = -kInfinity;
  }
}

}  // namespace pagedtree
