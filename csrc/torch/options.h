// Request options as op arguments: the fields of RequestOptions and the penalties of SamplingParams.
#pragma once

#include "core/options.h"
#include "torch/ops.h"

// clang-format off
#define PT_EACH_OPTION(X) \
  X(repetition_penalty) X(presence_penalty) X(frequency_penalty) X(prompt_mask) X(output_counts) X(allowed_mask) \
  X(bias_tokens) X(bias_values) X(cu_bias) X(bad_tokens) X(cu_bad_words) X(cu_bad_seqs) \
  X(history) X(history_lens) X(history_start) X(stop_ids) X(min_position)
// clang-format on

#define PT_OPTION_IN_SCHEMA(name) ", Tensor? " #name "=None"
#define PT_OPTION_PARAMETER(name) , const OptionalTensor& name
#define PT_OPTION_MEMBER(name) const OptionalTensor& name;
#define PT_OPTION_ARGUMENT(name) name,

// The end of a schema, of a host function's parameters, and an OptionTensors of them.
#define PT_OPTIONS PT_EACH_OPTION(PT_OPTION_IN_SCHEMA)
#define PT_OPTION_PARAMETERS PT_EACH_OPTION(PT_OPTION_PARAMETER)
#define PT_OPTION_TENSORS \
  OptionTensors { PT_EACH_OPTION(PT_OPTION_ARGUMENT) }

namespace pagedtree::ops {

struct OptionTensors {
  PT_EACH_OPTION(PT_OPTION_MEMBER)
};

OptionsParams options_params(const Check& check, const OptionTensors& tensors, int64_t batch, int64_t vocab);

// Adds the rows' paths in their trees; `verify` has everything except `parents`.
void add_paths(const Check& check, const VerifyParams& verify, const OptionalTensor& parents, OptionsParams& options);

// Allocates scratch for `items` rows or trees, which must live as long as the call.
Tensor add_option_rows(const Tensor& anchor, const Backend& backend, int64_t items, int64_t columns,
                       OptionsParams& options);

}  // namespace pagedtree::ops
