// The best tokens of one row of logits.
#pragma once

#include "core/common.h"

namespace pagedtree::cpu {

// Writes the k best tokens of a row of `vocab` logits, best first and the lower id first among equals, and their
// logits; -1 and -inf where fewer are finite. NaN reads as -inf, +inf as the largest finite. With `log_sum` it also
// yields the log of the sum of exp(logit - best logit). One pass over the row, whatever k.
void top_tokens(const void* row, DType dtype, int64_t vocab, int32_t k, int64_t* tokens, float* logits,
                double* log_sum);

}  // namespace pagedtree::cpu
