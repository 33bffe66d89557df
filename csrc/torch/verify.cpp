#include "torch/verify.h"

#define PT_WITH_WALKS
#include "core/verify/table.h"
#include "torch/options.h"
#include "torch/sampling.h"
#include "torch/values.h"

namespace pagedtree::ops {

void add_map(const Check& check, const OptionalTensor& draft_to_target, VerifyParams& params) {
  if (!draft_to_target.has_value()) return;
  params.draft_to_target = integers(check, *draft_to_target, "draft_to_target", "V_draft");
  params.draft_vocab = draft_to_target->size(0);
}

VerifyParams tree_params(const Check& check, const LogitsParams& logits, PT_TREE_PARAMETERS,
                         const OptionalTensor& draft_to_target, const char* rows_name) {
  VerifyParams params{};
  params.logits = logits;
  const int64_t rows = logits.num_rows;
  const auto size_of = [](const Tensor& t) { return t.defined() && t.dim() == 1 ? t.size(0) : -1; };
  const int64_t nodes = size_of(depths);
  // If drafts and trees agree, the logits have the wrong number of rows.
  if (rows != nodes && nodes >= 0 && size_of(draft_tokens) == nodes) {
    check.fail(rows_name, std::to_string(nodes) + " rows, one for each node of the trees",
               std::to_string(rows) + " rows");
  }
  params.draft_tokens = integers(check, draft_tokens, "draft_tokens", {"N", rows});
  add_map(check, draft_to_target, params);
  params.batch = check.offsets(cu_nodes, "cu_nodes", params.cu_nodes);
  params.depths = check.read<int32_t>(depths, "depths", {{"N", rows}});
  params.first_child = check.read<int32_t>(first_child, "first_child", {{"N", rows}});
  params.next_sibling = check.read<int32_t>(next_sibling, "next_sibling", {{"N", rows}});
  params.valid = check.read<uint8_t>(valid, "valid", {{"B", params.batch}});
  params.max_nodes = check.in(max_nodes, "max_nodes", 1, kMaxTreeNodes);
  params.max_depth = check.in(max_depth, "max_depth", 0, kMaxTreeNodes - 1);
  if (value_checks_enabled()) check_offsets(check, host_values<int32_t>(cu_nodes), "cu_nodes", rows);
  return params;
}

VerdictTensors make_verdict(const Check& check, const Tensor& anchor, const OptionalTensor& tokens_left,
                            VerifyParams& params) {
  params.tokens_left = check.read<int32_t>(tokens_left, "tokens_left", {{"B", params.batch}});
  const int64_t width = params.max_depth + 1;
  Tensor accept_index = made(anchor, {params.batch, width}, params.accept_index);
  Tensor num_accepted = made(anchor, {params.batch}, params.num_accepted);
  Tensor tokens = made(anchor, {params.batch, width}, params.tokens);
  Tensor status = made(anchor, {params.batch}, params.status);
  return {accept_index, num_accepted, tokens, status};
}

void add_streams(const Check& check, const Tensor& seeds, const Tensor& positions, VerifyParams& params) {
  params.seeds = check.read<int64_t>(seeds, "seeds", {{"B", params.batch}});
  params.positions = integers(check, positions, "positions", {"B", params.batch});
}

void add_coins(const Check& check, const OptionalTensor& coins, const OptionalTensor& final_coins,
               RatioParams& params) {
  params.coins = check.read<float>(coins, "coins", {{"N", params.verify.logits.num_rows}});
  params.final_coins = check.read<float>(final_coins, "final_coins", {{"B", params.verify.batch}});
}

DraftLaw draft_law_of(const Check& check, const std::string& name) {
  if (name == "iid") return DraftLaw::kIid;
  if (name == "swor") return DraftLaw::kSwor;
  check.that(name == "onehot", "draft_law", "\"iid\", \"swor\" or \"onehot\"", "\"" + name + "\"");
  return DraftLaw::kOneHot;
}

void add_draft_distributions(const Check& check, const OptionalTensor& draft_probs, const OptionalTensor& draft_rows,
                             int64_t vocab, RatioParams& params) {
  const bool drawn = params.law != DraftLaw::kOneHot;
  check.that(draft_probs.has_value() == drawn, "draft_probs",
             drawn ? "a Tensor, the distribution that the drafts were drawn from" : "None under draft_law \"onehot\"",
             drawn ? "None" : "a Tensor");
  const int64_t rows = params.verify.logits.num_rows;
  if (draft_rows.has_value()) {
    check.that(drawn, "draft_rows", "None under draft_law \"onehot\"", "a Tensor");
    params.draft_rows = integers(check, *draft_rows, "draft_rows", {"N", rows});
  }
  if (!drawn) return;
  params.draft = rows_params(check, *draft_probs, "draft_probs", min_of<int64_t>(vocab, 1));
  check.tensor(*draft_probs, "draft_probs", {draft_probs->scalar_type()},
               {{"M", draft_rows.has_value() ? kAnySize : rows}, {"V", vocab}}, Strides::kLastContiguous);
  if (!value_checks_enabled() || !draft_rows.has_value()) return;
  const auto check_rows = params.draft_rows.is_int64 ? check_range<int64_t> : check_range<int32_t>;
  check_rows(check, *draft_rows, "draft_rows", 0, params.draft.num_rows - 1);
}

namespace {

VerdictTensors run(const Check& check, const Tensor& logits, const OptionalTensor& tokens_left, VerifyParams& params) {
  const Backend& backend = backend_for(logits);
  VerdictTensors verdict = make_verdict(check, logits, tokens_left, params);
  const Tensor option_rows = add_option_rows(logits, backend, params.batch, params.logits.vocab, params.options);
  backend.verify_sampled(params, context_for(logits));
  return verdict;
}

void add_options(const Check& check, const OptionTensors& tensors, const OptionalTensor& parents,
                 VerifyParams& params) {
  params.options = options_params(check, tensors, params.batch, params.logits.vocab);
  params.options.positions = params.positions;
  add_paths(check, params, parents, params.options);
}

// A rule of core/verify/table.h, for verify_by_ratio.
#define PT_RULE(op, Params, Name, walk, needs) \
  struct Name##Rule {                          \
    static constexpr const char* kOp = #op;    \
    static constexpr int kNeeds = needs;       \
    static constexpr auto kRun = &Backend::op; \
  };
PT_EACH_WALK(PT_RULE, PT_SKIP)

// Checks, under PAGEDTREE_CHECK, that no node has two children.
void check_chains(const Check& check, const Tensor& next_sibling) {
  if (!value_checks_enabled()) return;
  const std::vector<int32_t> links = host_values<int32_t>(next_sibling);
  for (size_t n = 0; n < links.size(); ++n) {
    check.that(links[n] < 0, "trees", "chains", "a sibling of row " + std::to_string(n));
  }
}

VerdictTensors verify_greedy(const Tensor& logits, PT_TREE_PARAMETERS, const OptionalTensor& grammar_mask,
                             const OptionalTensor& draft_to_target, const OptionalTensor& tokens_left) {
  const Check check("verify_greedy", logits);
  VerifyParams params =
      tree_params(check, logits_params(check, logits, grammar_mask), PT_TREE_ARGUMENTS, draft_to_target);
  return run(check, logits, tokens_left, params);
}

VerdictTensors verify_sampled(const Tensor& logits, PT_TREE_PARAMETERS, PT_SAMPLING_PARAMETERS, const Tensor& seeds,
                              const Tensor& positions, const OptionalTensor& grammar_mask,
                              const OptionalTensor& draft_to_target, const OptionalTensor& tokens_left,
                              const OptionalTensor& parents PT_OPTION_PARAMETERS) {
  const Check check("verify_sampled", logits);
  VerifyParams params =
      tree_params(check, logits_params(check, logits, grammar_mask), PT_TREE_ARGUMENTS, draft_to_target);
  params.sampling = sampling_params(check, PT_SAMPLING_ARGUMENTS, params.batch);
  add_streams(check, seeds, positions, params);
  add_options(check, PT_OPTION_TENSORS, parents, params);
  return run(check, logits, tokens_left, params);
}

VerdictTensors verify_tokens(const Tensor& tokens, PT_TREE_PARAMETERS, const OptionalTensor& draft_to_target,
                             const OptionalTensor& tokens_left) {
  const Check check("verify_tokens", tokens);
  VerifyTokensParams params{};
  params.target_tokens = integers(check, tokens, "tokens", "N");
  LogitsParams rows{};
  rows.num_rows = tokens.size(0);
  params.verify = tree_params(check, rows, PT_TREE_ARGUMENTS, draft_to_target, "tokens");
  VerdictTensors verdict = make_verdict(check, tokens, tokens_left, params.verify);
  backend_for(tokens).verify_tokens(params, context_for(tokens));
  return verdict;
}

template <typename Rule>
VerdictTensors verify_by_ratio(const Tensor& logits, PT_TREE_PARAMETERS, PT_SAMPLING_PARAMETERS,
                               const std::string& draft_law, const OptionalTensor& draft_probs,
                               const OptionalTensor& draft_rows, const Tensor& seeds, const Tensor& positions,
                               const OptionalTensor& coins, const OptionalTensor& final_coins,
                               const OptionalTensor& grammar_mask, const OptionalTensor& draft_to_target,
                               const OptionalTensor& tokens_left, const OptionalTensor& draft_temperature,
                               const OptionalTensor& draft_top_k, const OptionalTensor& draft_top_p,
                               const OptionalTensor& draft_min_p, const std::string& draft_filter_order,
                               const OptionalTensor& parents PT_OPTION_PARAMETERS) {
  const Check check(Rule::kOp, logits);
  RatioParams params{};
  VerifyParams& verify = params.verify;
  verify = tree_params(check, logits_params(check, logits, grammar_mask), PT_TREE_ARGUMENTS, draft_to_target);
  verify.sampling = sampling_params(check, PT_SAMPLING_ARGUMENTS, verify.batch);
  add_streams(check, seeds, positions, verify);
  add_options(check, PT_OPTION_TENSORS, parents, verify);
  params.law = draft_law_of(check, draft_law);
  if ((Rule::kNeeds & kDrawn) != 0) {
    check.that(params.law != DraftLaw::kOneHot, "draft_law", "\"iid\" or \"swor\"", "\"onehot\"");
  }
  if ((Rule::kNeeds & kChains) != 0) check_chains(check, next_sibling);
  add_draft_distributions(check, draft_probs, draft_rows, verify.logits.vocab, params);
  const std::pair<const char*, const OptionalTensor*> draft_sampling[] = {
      {"draft_temperature", &draft_temperature},
      {"draft_top_k", &draft_top_k},
      {"draft_top_p", &draft_top_p},
      {"draft_min_p", &draft_min_p},
  };
  is_joint(check, draft_filter_order, "draft_");
  const bool of_logits = draft_temperature.has_value();
  for (const auto& [name, given] : draft_sampling) {
    check.that(given->has_value() == of_logits, name, "a Tensor with the others of draft_params, or None with them",
               of_logits ? "None" : "a Tensor");
  }
  if (of_logits) {
    check.that(params.law != DraftLaw::kOneHot, "draft_params", "None under draft_law \"onehot\"", "given");
    params.draft_sampling = sampling_params(check, *draft_temperature, *draft_top_k, *draft_top_p, *draft_min_p,
                                            draft_filter_order, verify.batch, "draft_");
  }
  add_coins(check, coins, final_coins, params);
  const int64_t walks = (Rule::kNeeds & kFrames) != 0 ? verify.batch : 0;
  const Tensor frames = made(logits, {walks, verify.max_depth + 1, kWordsOf<TraversalFrame>}, params.frames);
  VerdictTensors verdict = make_verdict(check, logits, tokens_left, verify);
  const Backend& backend = backend_for(logits);
  const bool lists = (Rule::kNeeds & kChains) != 0 && backend.max_option_rows > 0 && !verify.options.used &&
                     verify.logits.num_rows <= kMaxListedNodes;
  const Tensor nodes = made(logits, {lists ? verify.logits.num_rows : 0, kWordsOf<ListedNode>}, params.nodes);
  if (!lists) params.nodes = nullptr;
  const Tensor option_rows = add_option_rows(logits, backend, verify.batch, verify.logits.vocab, verify.options);
  (backend.*Rule::kRun)(params, context_for(logits));
  return verdict;
}

VerdictTensors verify_typical(const Tensor& logits, PT_TREE_PARAMETERS, PT_SAMPLING_PARAMETERS, double epsilon,
                              double delta, const OptionalTensor& grammar_mask, const OptionalTensor& draft_to_target,
                              const OptionalTensor& tokens_left) {
  const Check check("verify_typical", logits);
  RatioParams params{};
  params.verify = tree_params(check, logits_params(check, logits, grammar_mask), PT_TREE_ARGUMENTS, draft_to_target);
  params.verify.sampling = sampling_params(check, PT_SAMPLING_ARGUMENTS, params.verify.batch);
  check.that(epsilon >= 0.0 && epsilon <= 1.0, "epsilon", "0..1", epsilon);
  check.that(delta >= 0.0 && delta <= 3e38, "delta", "a finite number >= 0", delta);
  params.law = DraftLaw::kOneHot;
  params.epsilon = static_cast<float>(epsilon);
  params.delta = static_cast<float>(delta);
  VerdictTensors verdict = make_verdict(check, logits, tokens_left, params.verify);
  backend_for(logits).verify_typical(params, context_for(logits));
  return verdict;
}

#define PT_RATIO_RULE                                                                           \
  "(Tensor logits, " PT_TREES ", " PT_SAMPLING                                                  \
  ", *, str draft_law, Tensor? draft_probs=None, Tensor? draft_rows=None, Tensor seeds,"        \
  " Tensor positions, Tensor? coins=None, Tensor? final_coins=None, Tensor? grammar_mask=None," \
  " Tensor? draft_to_target=None, Tensor? tokens_left=None, Tensor? draft_temperature=None,"    \
  " Tensor? draft_top_k=None, Tensor? draft_top_p=None, Tensor? draft_min_p=None,"              \
  " str draft_filter_order=\"top_k_first\","                                                    \
  " Tensor? parents=None" PT_OPTIONS ") -> (" PT_VERDICT ")"

constexpr Op kOps[] = {
    {"verify_greedy",
     "(Tensor logits, " PT_TREES ", *, Tensor? grammar_mask=None, Tensor? draft_to_target=None,"
     " Tensor? tokens_left=None) -> (" PT_VERDICT ")",
     PT_BOX(&verify_greedy)},
    {"verify_sampled",
     "(Tensor logits, " PT_TREES ", " PT_SAMPLING
     ", *, Tensor seeds, Tensor positions, Tensor? grammar_mask=None, Tensor? draft_to_target=None,"
     " Tensor? tokens_left=None, Tensor? parents=None" PT_OPTIONS ") -> (" PT_VERDICT ")",
     PT_BOX(&verify_sampled)},
    {"verify_tokens",
     "(Tensor tokens, " PT_TREES ", *, Tensor? draft_to_target=None, Tensor? tokens_left=None) -> (" PT_VERDICT ")",
     PT_BOX(&verify_tokens)},
    {"verify_typical",
     "(Tensor logits, " PT_TREES ", " PT_SAMPLING ", *, float epsilon=0.09, float delta=0.3, Tensor? grammar_mask=None,"
     " Tensor? draft_to_target=None, Tensor? tokens_left=None) -> (" PT_VERDICT ")",
     PT_BOX(&verify_typical)},
#define PT_ENTRY(op, Params, Name, ...) {#op, PT_RATIO_RULE, PT_BOX(&verify_by_ratio<Name##Rule>)},
    PT_EACH_WALK(PT_ENTRY, PT_SKIP)};
#undef PT_RATIO_RULE

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
