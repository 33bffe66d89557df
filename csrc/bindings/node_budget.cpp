#include "bindings/node_budget.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

namespace pagedtree {

namespace {

// What each step keeps of the older evidence, so that a change of the text shows; and what is taken to be known before.
constexpr double kKept = 0.95, kPriorWeight = 2.0;
// How much of the evidence about one sequence a step keeps, and how many nodes are taken to be as easy as others'.
constexpr double kEaseKept = 0.9, kEaseWeight = 2.0;
// No node is more likely than this where its parent was accepted.
constexpr double kLeastLikely = 1e-6, kMostLikely = 0.97;
// Nodes of about the same log-probability, given their parents, are right about equally often; the bins' edges.
constexpr double kEdges[NodeBudget::kNumBins - 1] = {0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 1.7, 2.3, 3.0, 4.0, 6.0};

int bin_of(double surprise) {
  int bin = 0;
  while (bin < NodeBudget::kNumBins - 1 && !(surprise <= kEdges[bin])) ++bin;  // NaN: the last one
  return bin;
}

// How often the child of a rank is accepted where its parent was, before anything is known.
double prior_at(int rank) { return 0.6 * std::pow(0.35, rank); }

double prior_of_bin(int bin) {
  if (bin == 0) return 1.0;
  return std::exp(bin < NodeBudget::kNumBins - 1 ? -0.5 * (kEdges[bin - 1] + kEdges[bin]) : -7.0);
}

Evidence prior(double rate) { return {kPriorWeight * rate, kPriorWeight}; }

void move_towards(Evidence& evidence, const Evidence& goal, double share) {
  evidence.right += share * (goal.right - evidence.right);
  evidence.tried += share * (goal.tried - evidence.tried);
}

}  // namespace

NodeBudget::NodeBudget() {
  for (size_t i = 0; i < by_place.size(); ++i) by_place[i] = prior(prior_at(i % kMaxRanks));
  for (int bin = 0; bin < kNumBins; ++bin) by_likelihood[bin] = prior(prior_of_bin(bin));
}

void NodeBudget::forget() {
  const double share = 1.0 - std::pow(kKept, faded_);
  faded_ = 0;
  if (share == 0.0) return;
  for (size_t i = 0; i < by_place.size(); ++i) move_towards(by_place[i], prior(prior_at(i % kMaxRanks)), share);
  for (int bin = 0; bin < kNumBins; ++bin) move_towards(by_likelihood[bin], prior(prior_of_bin(bin)), share);
}

double NodeBudget::acceptance_at(int depth, int rank) const {
  double sum = 0.0, rate = 0.0;
  for (int i = 0; i < kMaxRanks; ++i) {
    const Evidence& evidence = by_place[depth * kMaxRanks + i];
    sum += evidence.right / evidence.tried;
    if (i == rank) rate = evidence.right / evidence.tried;
  }
  return rate / std::max(sum, 1.0);
}

Array<double> NodeBudget::acceptance() {
  forget();
  Array<double> rates({kMaxDepth, kMaxRanks});
  for (int depth = 0; depth < kMaxDepth; ++depth) {
    for (int rank = 0; rank < kMaxRanks; ++rank) rates.mutable_at(depth, rank) = acceptance_at(depth, rank);
  }
  return rates;
}

Array<double> NodeBudget::survival(const Array<int32_t>& offsets, const Array<int32_t>& parents,
                                   const std::optional<Array<float>>& log_probs, const Array<int64_t>& sequences) {
  BatchNodes nodes(offsets, parents);
  expect_dims(sequences, "sequences", 1);
  if (sequences.shape(0) != nodes.num_trees) throw std::invalid_argument("sequences: expected one for each tree");
  if (log_probs && (log_probs->ndim() != 1 || log_probs->shape(0) < nodes.size())) {
    throw std::invalid_argument("log_probs: expected one for each node");
  }
  forget();
  sequences_.assign(sequences.data(), sequences.data() + nodes.num_trees);
  std::vector<double> ease;
  for (const int64_t sequence : sequences_) {
    const auto known = of_sequences.find(sequence);
    const auto [hits, hoped] = known == of_sequences.end() ? std::pair(0.0, 0.0) : known->second;
    ease.push_back((hits + kEaseWeight) / (hoped + kEaseWeight));
  }
  // Of siblings the first ones stay: those drawn without replacement must not lose one before them.
  double of_place[kMaxDepth][kMaxRanks];
  for (int depth = 0; depth < kMaxDepth; ++depth) {
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      const double rate = acceptance_at(depth, rank);
      of_place[depth][rank] = rank == 0 ? rate : std::min(rate, of_place[depth][rank - 1]);
    }
  }
  Array<double> survival(nodes.size());
  double* alive = survival.mutable_data();
  rates_.assign(nodes.size(), 1.0);
  bins_.assign(log_probs ? nodes.size() : 0, 0);
  for (int32_t row = 0; row < nodes.size(); ++row) {
    alive[row] = 1.0;
    const int32_t parent = nodes.parent[row], depth = nodes.depth[row];
    if (depth == 0) continue;
    if (log_probs) {
      const int bin = bins_[row] = bin_of(double{log_probs->data()[parent]} - log_probs->data()[row]);
      rates_[row] = by_likelihood[bin].right / by_likelihood[bin].tried;
    } else {
      rates_[row] = of_place[std::min(depth, int32_t{kMaxDepth}) - 1][nodes.rank[row]];
    }
    alive[row] = alive[parent] * std::clamp(rates_[row] * ease[nodes.tree[row]], kLeastLikely, kMostLikely);
  }
  nodes_ = std::move(nodes);
  return survival;
}

std::pair<Array<int64_t>, Array<int64_t>> NodeBudget::observe(const Array<int64_t>& draft_tokens,
                                                              const std::optional<Array<int32_t>>& kept,
                                                              const Array<int32_t>& accept_index,
                                                              const Array<int64_t>& tokens) {
  if (!nodes_) throw std::invalid_argument("observe: expected a call of survival before");
  const BatchNodes nodes = *std::exchange(nodes_, std::nullopt);
  expect_dims(draft_tokens, "draft_tokens", 1);
  expect_dims(accept_index, "accept_index", 2);
  expect_dims(tokens, "tokens", 2);
  if (draft_tokens.shape(0) < nodes.size()) throw std::invalid_argument("draft_tokens: expected one for each node");
  if (accept_index.shape(0) != nodes.num_trees || tokens.shape(0) != nodes.num_trees ||
      tokens.shape(1) != accept_index.shape(1)) {
    throw std::invalid_argument("accept_index, tokens: expected [B, S]");
  }
  fade();
  forget();
  // Where the kept rows of each tree begin, in the order in which they were verified.
  std::vector<std::vector<int32_t>> rows(nodes.num_trees);
  for (int64_t i = 0, count = kept ? kept->size() : nodes.size(); i < count; ++i) {
    const int64_t row = kept ? kept->data()[i] : i;
    if (row >= 0 && row < nodes.size()) rows[nodes.tree[row]].push_back(static_cast<int32_t>(row));
  }
  std::vector<int64_t> came(nodes.size(), -1);  // the token behind each node
  for (int32_t b = 0; b < nodes.num_trees; ++b) {
    for (int64_t step = 0; step < accept_index.shape(1); ++step) {
      const int32_t node = accept_index.at(b, step);
      if (node >= 0 && node < static_cast<int64_t>(rows[b].size())) came[rows[b][node]] = tokens.at(b, step);
    }
  }
  Array<int64_t> tried(nodes.num_trees), right(nodes.num_trees);
  std::vector<double> expected(nodes.num_trees, 0.0);
  std::fill_n(tried.mutable_data(), nodes.num_trees, 0);
  std::fill_n(right.mutable_data(), nodes.num_trees, 0);
  for (int32_t row = 0; row < nodes.size(); ++row) {
    const int32_t depth = nodes.depth[row], b = nodes.tree[row];
    const int64_t token = came[nodes.parent[row]];
    if (depth == 0 || token < 0) continue;
    const bool is_right = draft_tokens.at(row) == token;
    tried.mutable_at(b) += 1;
    right.mutable_at(b) += is_right;
    expected[b] += rates_[row];
    const auto count = [is_right](Evidence& evidence) { evidence.tried += 1.0, evidence.right += is_right; };
    if (!bins_.empty()) count(by_likelihood[bins_[row]]);
    if (depth <= kMaxDepth) count(by_place[(depth - 1) * kMaxRanks + nodes.rank[row]]);
  }
  for (int32_t b = 0; b < nodes.num_trees; ++b) {
    auto& [hits, hoped] = of_sequences[sequences_[b]];
    hits = kEaseKept * hits + right.at(b);
    hoped = kEaseKept * hoped + expected[b];
  }
  return {tried, right};
}

int64_t best_count(const Array<double>& worth, const Array<bool>& is_draft, double fixed, double row) {
  expect_dims(worth, "worth", 1);
  expect_dims(is_draft, "is_draft", 1);
  if (worth.shape(0) != is_draft.shape(0)) throw std::invalid_argument("is_draft: expected one for each node");
  double done = 0.0;
  std::vector<double> drafts;
  for (int64_t i = 0; i < worth.shape(0); ++i) {
    if (is_draft.at(i)) {
      drafts.push_back(worth.at(i));
    } else {
      done += worth.at(i);
    }
  }
  std::sort(drafts.begin(), drafts.end(), std::greater<double>());
  const int64_t num_roots = worth.shape(0) - static_cast<int64_t>(drafts.size());
  double best = done / fixed, seconds = fixed;
  int64_t count = 0;
  for (size_t i = 0; i < drafts.size(); ++i) {
    done += drafts[i], seconds += row;
    if (done / seconds > best) best = done / seconds, count = static_cast<int64_t>(i) + 1;
  }
  return num_roots + count;
}

}  // namespace pagedtree
