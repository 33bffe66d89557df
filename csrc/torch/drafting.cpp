#include "core/drafting.h"

#include "core/best_first.h"
#include "core/ngram.h"
#include "core/select_nodes.h"
#include "torch/ops.h"
#include "torch/sampling.h"
#include "torch/values.h"

namespace pagedtree::ops {
namespace {

// Params with the growing tree's tensors [B, C], common to several ops.
template <typename Params>
Params candidate_params(const Check& check, const Tensor& tokens, const Tensor& parents, const Tensor& scores,
                        const Tensor& kv_index) {
  Params params{};
  params.tokens = check.read<int64_t>(tokens, "tokens", {"B", "C"});
  params.batch = tokens.size(0);
  params.num_candidates = tokens.size(1);
  check.that(params.num_candidates >= 1 && params.num_candidates <= kMaxCandidates, "tokens",
             "1 to 2^20 candidates per sequence", params.num_candidates);
  const Axis sequences("B", params.batch), candidates("C", params.num_candidates);
  params.parents = check.read<int32_t>(parents, "parents", {sequences, candidates});
  params.scores = check.read<float>(scores, "scores", {sequences, candidates});
  params.kv_index = check.read<int32_t>(kv_index, "kv_index", {sequences, candidates});
  return params;
}

GrowthLaw growth_law(const Check& check, const std::string& law) {
  if (law == "topk") return GrowthLaw::kTopK;
  if (law == "iid") return GrowthLaw::kIid;
  if (law == "swor") return GrowthLaw::kSwor;
  check.that(law == "coupled", "law", "\"topk\", \"iid\", \"swor\" or \"coupled\"", "\"" + law + "\"");
  return GrowthLaw::kCoupled;
}

// tokens, parents, scores, kv_index, frontier, mask, draft_probs
using ExpandedTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

ExpandedTensors expand_tree(const Tensor& tokens, const Tensor& parents, const Tensor& scores, const Tensor& kv_index,
                            const Tensor& frontier, const Tensor& mask, const Tensor& logits, int64_t level,
                            int64_t num_kv, int64_t num_children, int64_t num_frontier, const std::string& law,
                            const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
                            const OptionalTensor& min_p, const std::string& filter_order, const OptionalTensor& seeds,
                            const OptionalTensor& positions) {
  const Check check("expand_tree", tokens);
  auto params = candidate_params<ExpandTreeParams>(check, tokens, parents, scores, kv_index);
  const int64_t batch = params.batch, num_candidates = params.num_candidates;
  params.frontier = check.read<int32_t>(frontier, "frontier", {{"B", batch}, "F"});
  const int64_t num_expanded = frontier.size(1);
  check.that(num_expanded >= 1, "frontier", "at least one node", num_expanded);
  params.mask = check.read<int32_t>(mask, "mask", {{"B * F", batch * num_expanded}, "W"});
  const int64_t mask_words = mask.size(1);
  check.that(mask_words <= kMaxTreeNodes / kMaskWordBits, "mask", "at most 32 words per row", mask_words);

  params.law = growth_law(check, law);
  params.logits = logits_params(check, logits);
  const int64_t vocab = params.logits.vocab;
  check.tensor(logits, "logits", {logits.scalar_type()}, {{"B * F", batch * num_expanded}, "V"},
               Strides::kLastContiguous);
  const bool sampled = params.law != GrowthLaw::kTopK;
  for (const auto& [name, given] : {std::pair{"temperature", &temperature},
                                    {"top_k", &top_k},
                                    {"top_p", &top_p},
                                    {"min_p", &min_p},
                                    {"seeds", &seeds},
                                    {"positions", &positions}}) {
    check.that(given->has_value() == sampled, name, sampled ? "a tensor under this law" : "None under law \"topk\"",
               sampled ? "None" : "a tensor");
  }
  is_joint(check, filter_order);
  if (sampled) {
    params.sampling = sampling_params(check, *temperature, *top_k, *top_p, *min_p, filter_order, batch);
    params.seeds = check.read<int64_t>(*seeds, "seeds", {{"B", batch}});
    params.positions = integers(check, *positions, "positions", {"B", batch});
  }
  const int64_t most = params.law == GrowthLaw::kIid ? kMaxTreeNodes : min_of<int64_t>(vocab, kMaxTreeNodes);
  params.num_children = check.in(num_children, "num_children", 1, most);
  const int64_t num_new = num_expanded * num_children;
  params.num_frontier = check.in(num_frontier, "num_frontier", 0, num_new);
  check.that(num_candidates + num_new <= kMaxCandidates, "num_children", "a number that keeps candidates within 2^20",
             num_children);
  params.level = check.in(level, "level", 0, kMaxTreeNodes - 1);
  const int64_t room = mask_words * kMaskWordBits;
  check.that(num_kv >= num_expanded && num_kv <= room, "num_kv",
             std::to_string(num_expanded) + ".." + std::to_string(room) + ", the frontier's nodes included", num_kv);
  check.that(num_frontier <= room - num_kv, "num_frontier",
             "at most " + std::to_string(room - num_kv) + " (max_kv_nodes less those fed)", num_frontier);

  Tensor out_tokens = made(tokens, {batch, num_candidates + num_new}, params.out_tokens);
  Tensor out_parents = made(tokens, {batch, num_candidates + num_new}, params.out_parents);
  Tensor out_scores = made(tokens, {batch, num_candidates + num_new}, params.out_scores);
  Tensor out_kv_index = made(tokens, {batch, num_candidates + num_new}, params.out_kv_index);
  Tensor out_frontier = made(tokens, {batch, num_frontier}, params.out_frontier);
  Tensor out_mask = made(tokens, {batch * num_frontier, mask_words}, params.out_mask);
  Tensor draft_probs = made(tokens, {sampled ? batch * num_expanded : 0, vocab}, params.draft_probs);
  Tensor frontier_scores = made(tokens, {batch, num_frontier}, params.frontier_scores);

  params.num_expanded = static_cast<int32_t>(num_expanded);
  params.num_kv = static_cast<int32_t>(num_kv);
  params.mask_words = static_cast<int32_t>(mask_words);
  backend_for(tokens).expand_tree(params, context_for(tokens));
  return {out_tokens, out_parents, out_scores, out_kv_index, out_frontier, out_mask, draft_probs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rerank_tree(const Tensor& tokens, const Tensor& parents,
                                                       const Tensor& scores, const Tensor& kv_index, int64_t num_nodes,
                                                       bool by_score, OptionalTensor active) {
  const Check check("rerank_tree", tokens);
  auto params = candidate_params<RerankTreeParams>(check, tokens, parents, scores, kv_index);
  const int64_t batch = params.batch;
  params.num_nodes = check.in(num_nodes, "num_nodes", 1, kMaxTreeNodes);
  params.active = check.read<uint8_t>(active, "active", {{"B", batch}});

  Tensor draft_tokens = made(tokens, {batch * num_nodes}, params.draft_tokens);
  Tensor out_parents = made(tokens, {batch * num_nodes}, params.out_parents);
  Tensor cu_nodes = made(tokens, {batch + 1}, params.cu_nodes);
  Tensor node_map = made(tokens, {batch * num_nodes}, params.node_map);
  Tensor best_scores = made(tokens, {batch, num_nodes}, params.best_scores);
  Tensor best = made(tokens, {batch, num_nodes}, params.best);
  Tensor node_of = made(tokens, {batch, params.num_candidates}, params.node_of);

  params.by_score = by_score;
  backend_for(tokens).rerank_tree(params, context_for(tokens));
  return {draft_tokens, out_parents, cu_nodes, node_map};
}

std::tuple<Tensor, Tensor, Tensor> ngram_propose(const Tensor& history, const Tensor& history_lens, int64_t max_nodes,
                                                 int64_t max_depth, int64_t min_ngram, int64_t max_ngram,
                                                 int64_t max_branches, OptionalTensor extra, OptionalTensor active,
                                                 OptionalTensor history_rows) {
  const Check check("ngram_propose", history);
  NgramProposeParams params{};
  const char* const histories = history_rows.has_value() ? "P" : "B";
  params.history = check.read<int64_t>(history, "history", {histories, "H"}, Strides::kLastContiguous);
  params.history_lens = check.read<int32_t>(history_lens, "history_lens", {{histories, history.size(0)}});
  params.history_rows = check.read<int32_t>(history_rows, "history_rows", {"B"});
  const int64_t batch = history_rows.has_value() ? history_rows->size(0) : history.size(0);
  params.max_nodes = check.in(max_nodes, "max_nodes", 1, kMaxTreeNodes);
  params.max_depth = check.in(max_depth, "max_depth", 0, kMaxTreeNodes - 1);
  check.that(min_ngram >= 1, "min_ngram", "at least 1", min_ngram);
  check.that(max_ngram >= min_ngram && max_ngram <= kMaxNgram, "max_ngram", "min_ngram.." + std::to_string(kMaxNgram),
             max_ngram);
  check.that(max_branches >= 0, "max_branches", "at least 0", max_branches);
  params.extra = check.read<int64_t>(extra, "extra", {{"B", batch}, "E"}, Strides::kLastContiguous);
  const int64_t width = history.size(1) + (extra.has_value() ? extra->size(1) : 0);
  check.that(width < kMaxRows, "history", "less than 2^31 tokens per row, extra included", width);
  params.active = check.read<uint8_t>(active, "active", {{"B", batch}});
  if (value_checks_enabled()) check_histories(check, history, history_lens, history_rows);

  Tensor draft_tokens = made(history, {batch * max_nodes}, params.draft_tokens);
  Tensor parents = made(history, {batch * max_nodes}, params.parents);
  Tensor cu_nodes = made(history, {batch + 1}, params.cu_nodes);
  Tensor trie_tokens = made(history, {batch, max_nodes}, params.trie_tokens);
  Tensor trie_links = made(history, {batch, 4, max_nodes}, params.trie_links);
  Tensor trie_sizes = made(history, {batch}, params.trie_sizes);
  Tensor places = made(history, {batch, width}, params.places);
  Tensor match_lengths = empty_on(history, {batch, width}, ScalarType::Byte);

  params.match_lengths = mutable_pointer<uint8_t>(match_lengths);
  params.batch = batch;
  params.num_histories = history.size(0);
  params.history_width = history.size(1);
  params.history_stride = history.stride(0);
  params.extra_width = extra.has_value() ? extra->size(1) : 0;
  params.extra_stride = extra.has_value() ? extra->stride(0) : 0;
  params.min_ngram = static_cast<int32_t>(min_ngram);
  params.max_ngram = static_cast<int32_t>(max_ngram);
  params.max_branches = static_cast<int32_t>(min_of<int64_t>(max_branches, kMaxTreeNodes));
  backend_for(history).ngram_propose(params, context_for(history));
  return {draft_tokens, parents, cu_nodes};
}

std::tuple<Tensor, Tensor, Tensor> medusa_propose(const Tensor& head_logits, const Tensor& parents,
                                                  const Tensor& depths, const Tensor& child_ranks, int64_t num_top,
                                                  OptionalTensor root_tokens, OptionalTensor active) {
  const Check check("medusa_propose", head_logits);
  MedusaProposeParams params{};
  check.tensor(head_logits, "head_logits", {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {"B", "H", "V"},
               Strides::kLastContiguous);
  const int64_t batch = head_logits.size(0), num_heads = head_logits.size(1), vocab = head_logits.size(2);
  params.parents = check.read<int32_t>(parents, "parents", {"N"});
  const int64_t num_nodes = parents.size(0);
  check.that(num_nodes >= 1 && num_nodes <= kMaxTreeNodes, "parents", "1 to 1024 nodes", num_nodes);
  params.depths = check.read<int32_t>(depths, "depths", {{"N", num_nodes}});
  params.child_ranks = check.read<int32_t>(child_ranks, "child_ranks", {{"N", num_nodes}});
  const int64_t most = min_of<int64_t>(vocab, kMaxTreeNodes);
  params.num_top = check.in(num_top, "num_top", 0, most);
  params.root_tokens = check.read<int64_t>(root_tokens, "root_tokens", {{"B", batch}});
  params.active = check.read<uint8_t>(active, "active", {{"B", batch}});

  Tensor draft_tokens = made(head_logits, {batch * num_nodes}, params.draft_tokens);
  Tensor out_parents = made(head_logits, {batch * num_nodes}, params.out_parents);
  Tensor cu_nodes = made(head_logits, {batch + 1}, params.cu_nodes);
  Tensor top_tokens = made(head_logits, {batch, num_heads, num_top}, params.top_tokens);
  Tensor top_scores = made(head_logits, {batch, num_heads, num_top}, params.top_scores);

  params.head_logits.data = head_logits.const_data_ptr();
  params.head_logits.num_rows = batch;
  params.head_logits.vocab = vocab;
  params.head_logits.row_stride = head_logits.stride(0);
  params.head_logits.dtype = logits_dtype(head_logits);
  params.head_stride = head_logits.stride(1);
  params.batch = batch;
  params.num_heads = static_cast<int32_t>(num_heads);
  params.num_nodes = static_cast<int32_t>(num_nodes);
  backend_for(head_logits).medusa_propose(params, context_for(head_logits));
  return {draft_tokens, out_parents, cu_nodes};
}

// The fields of TreeBatch.
using TreeTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

TreeTensors made_trees(const Tensor& anchor, int64_t batch, int64_t num_rows, int64_t max_nodes, TreeOutput& trees) {
  trees.mask_words = static_cast<int32_t>(ceil_div<int64_t>(max_nodes, kMaskWordBits));
  return {made(anchor, {batch + 1}, trees.cu_nodes),
          made(anchor, {num_rows}, trees.parents),
          made(anchor, {num_rows}, trees.depths),
          made(anchor, {num_rows}, trees.first_child),
          made(anchor, {num_rows}, trees.next_sibling),
          made(anchor, {num_rows, trees.mask_words}, trees.mask),
          made(anchor, {batch}, trees.valid)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> best_first_tree(
    const Tensor& log_probs, const Tensor& tokens, const Tensor& root_tokens, int64_t num_nodes) {
  const Check check("best_first_tree", log_probs);
  BestFirstTreeParams params{};
  params.log_probs = check.read<float>(log_probs, "log_probs", {"B", "H", "K"}, Strides::kLastContiguous);
  const int64_t batch = log_probs.size(0), num_levels = log_probs.size(1), num_candidates = log_probs.size(2);
  check.that(num_levels < kMaxTreeNodes, "log_probs", "at most 1023 levels", num_levels);
  check.that(num_candidates <= kMaxVocab, "log_probs", "at most 2^20 candidates per level", num_candidates);
  params.tokens = check.read<int64_t>(tokens, "tokens", {{"B", batch}, {"H", num_levels}, {"K", num_candidates}},
                                      Strides::kLastContiguous);
  params.root_tokens = check.read<int64_t>(root_tokens, "root_tokens", {{"B", batch}});
  params.num_nodes = check.in(num_nodes, "num_nodes", 1, kMaxTreeNodes);
  check.that(batch * num_nodes < kMaxRows, "num_nodes", "a number that keeps all trees below 2^31 nodes", num_nodes);

  Tensor draft_tokens = made(log_probs, {batch * num_nodes}, params.draft_tokens);
  Tensor joints = made(log_probs, {batch * num_nodes}, params.joints);
  TreeTensors trees = made_trees(log_probs, batch, batch * num_nodes, num_nodes, params.trees);

  params.batch = batch;
  set_strides(log_probs, params.log_probs_stride, params.log_probs_level_stride);
  set_strides(tokens, params.tokens_stride, params.tokens_level_stride);
  params.num_levels = static_cast<int32_t>(num_levels);
  params.num_candidates = static_cast<int32_t>(num_candidates);
  backend_for(log_probs).best_first_tree(params, context_for(log_probs));
  return std::tuple_cat(std::tuple{draft_tokens, joints}, trees);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> select_nodes(
    const Tensor& cu_nodes, const Tensor& parents, const Tensor& depths, const Tensor& valid, const Tensor& survival,
    int64_t budget, int64_t max_nodes, int64_t max_depth, OptionalTensor limit) {
  const Check check("select_nodes", cu_nodes);
  SelectNodesParams params{};
  params.batch = check.offsets(cu_nodes, "cu_nodes", params.cu_nodes);
  const int64_t batch = params.batch;
  params.parents = check.read<int32_t>(parents, "parents", {"N"});
  const int64_t num_rows = parents.size(0);
  check.that(num_rows < kMaxRows, "parents", "less than 2^31 rows", num_rows);
  params.depths = check.read<int32_t>(depths, "depths", {{"N", num_rows}});
  params.valid = check.read<uint8_t>(valid, "valid", {{"B", batch}});
  params.survival = check.read<float>(survival, "survival", {{"N", num_rows}});
  check.that(budget >= 0 && budget < kMaxRows, "budget", "0..2^31 - 1", budget);
  params.max_nodes = check.in(max_nodes, "max_nodes", 1, kMaxTreeNodes);
  params.max_depth = check.in(max_depth, "max_depth", 0, kMaxTreeNodes - 1);
  params.limit = check.read<int32_t>(limit, "limit", {{"limit", 1}});
  if (value_checks_enabled()) check_offsets(check, host_values<int32_t>(cu_nodes), "cu_nodes", num_rows);

  const int64_t capacity = max_of(budget, batch);
  TreeTensors trees = made_trees(cu_nodes, batch, capacity, max_nodes, params.trees);
  Tensor node_map = made(cu_nodes, {capacity}, params.node_map);
  Tensor keys = made(cu_nodes, {num_rows}, params.keys);

  params.num_rows = num_rows;
  params.capacity = capacity;
  params.budget = budget;
  backend_for(cu_nodes).select_nodes(params, context_for(cu_nodes));
  return std::tuple_cat(trees, std::tuple{node_map});
}

constexpr Op kOps[] = {
    {"expand_tree",
     "(Tensor tokens, Tensor parents, Tensor scores, Tensor kv_index, Tensor frontier, Tensor mask,"
     " Tensor logits, *, SymInt level, SymInt num_kv, SymInt num_children, SymInt num_frontier, str law=\"topk\","
     " Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None,"
     " str filter_order=\"top_k_first\", Tensor? seeds=None, Tensor? positions=None)"
     " -> (Tensor tokens, Tensor parents, Tensor scores, Tensor kv_index, Tensor frontier, Tensor mask,"
     " Tensor draft_probs)",
     PT_BOX(&expand_tree)},
    {"rerank_tree",
     "(Tensor tokens, Tensor parents, Tensor scores, Tensor kv_index, *, SymInt num_nodes, bool by_score,"
     " Tensor? active=None) -> (Tensor draft_tokens, Tensor parents, Tensor cu_nodes, Tensor node_map)",
     PT_BOX(&rerank_tree)},
    {"ngram_propose",
     "(Tensor history, Tensor history_lens, *, SymInt max_nodes, SymInt max_depth, SymInt min_ngram=1,"
     " SymInt max_ngram=4, SymInt max_branches=8, Tensor? extra=None, Tensor? active=None,"
     " Tensor? history_rows=None) -> (Tensor draft_tokens, Tensor parents, Tensor cu_nodes)",
     PT_BOX(&ngram_propose)},
    {"medusa_propose",
     "(Tensor head_logits, Tensor parents, Tensor depths, Tensor child_ranks, *, SymInt num_top,"
     " Tensor? root_tokens=None, Tensor? active=None) -> (Tensor draft_tokens, Tensor parents, Tensor cu_nodes)",
     PT_BOX(&medusa_propose)},
    {"best_first_tree",
     "(Tensor log_probs, Tensor tokens, Tensor root_tokens, SymInt num_nodes)"
     " -> (Tensor draft_tokens, Tensor joints, Tensor cu_nodes, Tensor parents, Tensor depths, Tensor first_child,"
     " Tensor next_sibling, Tensor mask, Tensor valid)",
     PT_BOX(&best_first_tree)},
    {"select_nodes",
     "(Tensor cu_nodes, Tensor parents, Tensor depths, Tensor valid, Tensor survival, SymInt budget, *,"
     " SymInt max_nodes, SymInt max_depth, Tensor? limit=None)"
     " -> (Tensor cu_nodes, Tensor parents, Tensor depths, Tensor first_child, Tensor next_sibling, Tensor mask,"
     " Tensor valid, Tensor node_map)",
     PT_BOX(&select_nodes)},
};

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
