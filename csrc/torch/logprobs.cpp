#include "core/logprobs.h"

#include "torch/options.h"
#include "torch/sampling.h"
#include "torch/values.h"
#include "torch/verify.h"

namespace pagedtree::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> token_logprobs(const Tensor& logits, const Tensor& tokens,
                                                          const OptionalTensor& rows, const OptionalTensor& temperature,
                                                          const OptionalTensor& top_k, const OptionalTensor& top_p,
                                                          const OptionalTensor& min_p, const std::string& filter_order,
                                                          int64_t top_n PT_OPTION_PARAMETERS) {
  const Check check("token_logprobs", logits);
  TokenLogprobsParams params{};
  params.logits = logits_params(check, logits);
  const int64_t vocab = params.logits.vocab;
  params.tokens = integers(check, tokens, "tokens", {"R", rows.has_value() ? kAnySize : params.logits.num_rows});
  params.num_tokens = tokens.size(0);
  if (rows.has_value()) params.rows = integers(check, *rows, "rows", {"R", params.num_tokens});
  const std::pair<const char*, const OptionalTensor*> sampling[] = {
      {"temperature", &temperature}, {"top_k", &top_k}, {"top_p", &top_p}, {"min_p", &min_p}};
  for (const auto& [name, given] : sampling) {
    check.that(given->has_value() == temperature.has_value(), name,
               "a Tensor with the others of params, or None with them", temperature.has_value() ? "None" : "a Tensor");
  }
  is_joint(check, filter_order);
  if (temperature.has_value()) {
    params.sampling = sampling_params(check, *temperature, *top_k, *top_p, *min_p, filter_order, params.num_tokens);
  }
  const int64_t most = min_of<int64_t>(vocab, kMaxTreeNodes);
  params.top_n = check.in(top_n, "top_n", 0, most);
  params.options = options_params(check, PT_OPTION_TENSORS, params.num_tokens, vocab);
  Tensor logprobs = made(logits, {params.num_tokens}, params.logprobs);
  Tensor ranks = made(logits, {params.num_tokens}, params.ranks);
  Tensor top_tokens = made(logits, {params.num_tokens, top_n}, params.top_tokens);
  Tensor top_logprobs = made(logits, {params.num_tokens, top_n}, params.top_logprobs);
  const Backend& backend = backend_for(logits);
  const Tensor option_rows = add_option_rows(logits, backend, params.num_tokens, vocab, params.options);
  backend.token_logprobs(params, context_for(logits));
  return {logprobs, ranks, top_tokens, top_logprobs};
}

constexpr Op kOps[] = {
    {"token_logprobs",
     "(Tensor logits, Tensor tokens, *, Tensor? rows=None, Tensor? temperature=None, Tensor? top_k=None,"
     " Tensor? top_p=None, Tensor? min_p=None, str filter_order=\"top_k_first\", SymInt top_n=0" PT_OPTIONS
     ") -> (Tensor logprobs, Tensor ranks, Tensor top_tokens, Tensor top_logprobs)",
     PT_BOX(&token_logprobs)},
};

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
