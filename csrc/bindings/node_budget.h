// Which drafted nodes survive, from what was accepted before; see pagedtree.generation.node_budget.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/arrays.h"

namespace pagedtree {

// Numbers of guesses that were right and that were compared, older ones counting less.
struct Evidence {
  double right = 0.0, tried = 0.0;
};

class NodeBudget {
 public:
  static constexpr int kMaxDepth = 8, kMaxRanks = BatchNodes::kMaxRanks, kNumBins = 12;

  NodeBudget();

  // double [N]: how likely each node is on the accepted path; 1 at roots.
  // log_probs: [N or more], the joint ones of the nodes by the drafter, if it knows them. sequences: [B], each tree's.
  Array<double> survival(const Array<int32_t>& offsets, const Array<int32_t>& parents,
                         const std::optional<Array<float>>& log_probs, const Array<int64_t>& sequences);

  // Counts what became of the nodes that `survival` was asked about last. For each tree, int64 [B]: how many of them
  // were compared with the token that came, and how many were right.
  // draft_tokens: [N or more]. kept: the rows that were verified, all if not given. accept_index, tokens: [B, S], the
  // accepted nodes of each kept tree (-1: none), and the token that came behind each.
  std::pair<Array<int64_t>, Array<int64_t>> observe(const Array<int64_t>& draft_tokens,
                                                    const std::optional<Array<int32_t>>& kept,
                                                    const Array<int32_t>& accept_index, const Array<int64_t>& tokens);

  // A step has told nothing: older evidence counts a little less.
  void fade() { ++faded_; }

  // double [depth, rank]: how often a node is accepted where its parent was.
  Array<double> acceptance();

  // By depth and rank, and by how likely the drafter held a node where its parent was accepted.
  std::array<Evidence, kMaxDepth * kMaxRanks> by_place;
  std::array<Evidence, kNumBins> by_likelihood;
  // Of each sequence: the accepted nodes, and those that were expected to be.
  std::unordered_map<int64_t, std::pair<double, double>> of_sequences;

 private:
  void forget();
  double acceptance_at(int depth, int rank) const;

  int faded_ = 0;  // steps that have told nothing since the last that did
  // Of the last `survival`.
  std::optional<BatchNodes> nodes_;
  std::vector<int64_t> sequences_;
  std::vector<double> rates_;  // of each node where its parent was accepted, as for any sequence
  std::vector<int> bins_;      // none if the drafter told nothing
};

// How many rows, all roots among them, get the most done in a second. worth: [N], what a node is worth if it is
// accepted, times how likely that is. is_draft: bool [N], false at roots. A step takes `fixed` seconds, and `row` more
// for each node besides the roots.
int64_t best_count(const Array<double>& worth, const Array<bool>& is_draft, double fixed, double row);

}  // namespace pagedtree
