// Checks of logits and sampling parameters.
#pragma once

#include "core/params.h"
#include "torch/check.h"

#define PT_SAMPLING "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, str filter_order"
#define PT_SAMPLING_PARAMETERS                                                              \
  const Tensor &temperature, const Tensor &top_k, const Tensor &top_p, const Tensor &min_p, \
      const std::string &filter_order
#define PT_SAMPLING_ARGUMENTS temperature, top_k, top_p, min_p, filter_order

namespace pagedtree::ops {

DType logits_dtype(const Tensor& logits);

// Rows [rows, V] of logits or probabilities, with any stride >= V.
LogitsParams rows_params(const Check& check, const Tensor& rows, const std::string& name, int64_t min_vocab = 1);
inline LogitsParams logits_params(const Check& check, const Tensor& logits) {
  return rows_params(check, logits, "logits");
}

// Adds a grammar mask, bool [rows, V] or packed int32 [rows, ceil(V / 32)].
void add_grammar_mask(const Check& check, const OptionalTensor& grammar_mask, LogitsParams& logits);

inline LogitsParams logits_params(const Check& check, const Tensor& logits, const OptionalTensor& grammar_mask) {
  LogitsParams params = logits_params(check, logits);
  add_grammar_mask(check, grammar_mask, params);
  return params;
}

// Returns true for "joint". Rejects invalid names even if there are no parameters.
bool is_joint(const Check& check, const std::string& filter_order, const std::string& prefix = "");

// Requires [1] or [batch] parameters. `prefix` precedes their names in messages.
SamplingParams sampling_params(const Check& check, PT_SAMPLING_PARAMETERS, int64_t batch,
                               const std::string& prefix = "");

}  // namespace pagedtree::ops
