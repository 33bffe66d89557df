// Checks common to the verify ops, on whole or split vocabularies.
#pragma once

#include "core/verify/rules.h"
#include "torch/ops.h"

#define PT_TREES                                                                                                \
  "Tensor draft_tokens, Tensor cu_nodes, Tensor depths, Tensor first_child, Tensor next_sibling, Tensor valid," \
  " SymInt max_nodes, SymInt max_depth"
#define PT_TREE_PARAMETERS                                                                             \
  const Tensor &draft_tokens, const Tensor &cu_nodes, const Tensor &depths, const Tensor &first_child, \
      const Tensor &next_sibling, const Tensor &valid, int64_t max_nodes, int64_t max_depth
#define PT_TREE_ARGUMENTS draft_tokens, cu_nodes, depths, first_child, next_sibling, valid, max_nodes, max_depth
#define PT_VERDICT "Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status"

namespace pagedtree::ops {

using VerdictTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // as PT_VERDICT

// Params except distributions. Uses only the row count and vocabulary of `logits`, from the argument `rows_name`.
VerifyParams tree_params(const Check& check, const LogitsParams& logits, PT_TREE_PARAMETERS,
                         const OptionalTensor& draft_to_target, const char* rows_name = "logits");

void add_map(const Check& check, const OptionalTensor& draft_to_target, VerifyParams& params);

// Allocates at most tokens_left[b] tokens for sequence b.
VerdictTensors make_verdict(const Check& check, const Tensor& anchor, const OptionalTensor& tokens_left,
                            VerifyParams& params);

void add_streams(const Check& check, const Tensor& seeds, const Tensor& positions, VerifyParams& params);

void add_coins(const Check& check, const OptionalTensor& coins, const OptionalTensor& final_coins, RatioParams& params);

DraftLaw draft_law_of(const Check& check, const std::string& name);

// Adds the distributions of the draws [M, vocab], and each node's row in them.
void add_draft_distributions(const Check& check, const OptionalTensor& draft_probs, const OptionalTensor& draft_rows,
                             int64_t vocab, RatioParams& params);

}  // namespace pagedtree::ops
