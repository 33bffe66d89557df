// Checks that sample and the verify ops share: rows of logits, sampling parameters.
#pragma once

#include "core/params.h"
#include "torch/check.h"

namespace pagedtree::ops {

DType logits_dtype(const Tensor& logits);

// Logits [rows, V], V >= 1, with rows at any stride >= V.
LogitsParams logits_params(const Check& check, const Tensor& logits);

// Adds a grammar mask, bool [rows, V] or packed int32 [rows, ceil(V / 32)].
void add_grammar_mask(const Check& check, const std::optional<Tensor>& grammar_mask, LogitsParams& logits);

// Each parameter is [1] or [batch].
SamplingParams sampling_params(const Check& check, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                               const Tensor& min_p, const std::string& filter_order, int64_t batch);

}  // namespace pagedtree::ops
