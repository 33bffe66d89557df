// Block verification of a chain (Sun et al., ICLR 2025): accepts the longest prefix whose coin allows it.
// w_0 = 1;  w_i = min(w_(i-1) * p(x_i) / q(x_i), 1)
// h_i = z / (z + 1 - w_i), z = sum of max(w_i * p - q, 0);  accepted = max{i: coin_i < h_i}, h at the end = w
#pragma once

#include "core/verify/rules.h"

namespace pagedtree {

// Smaller weights count as 0, so that inverses stay finite.
constexpr double kLeastWeight = 1e-200;

// The tokens of a row that filters keep, ascending.
struct KeptList {
  static constexpr uint32_t kMost = 512;
  uint32_t size;
  int32_t tokens[kMost];
  float masses[kMost], drafts[kMost];  // of the target and the draft

  // Returns the first entry with a token >= `least`.
  PT_HOST_DEVICE uint32_t place_of(int32_t least) {
    return static_cast<uint32_t>(TriedTokens{tokens, static_cast<int32_t>(size)}.lower_bound(least));
  }
};

// A node whose tokens are listed before its chain is walked.
struct ListedNode {
  NodeDistributions distributions;
  KeptList list;  // size 0: none, or too many tokens
};
constexpr int64_t kMaxListedNodes = (int64_t{1} << 30) / sizeof(ListedNode);  // 1 GiB

// Counts 0 / 0 as its limit, even if rounding leaves a little more than 0.
PT_HOST_DEVICE double acceptance_of(double z, double weight) {
  const double whole = z + (1.0 - weight);
  return whole > kRounding ? z / whole : 1.0;
}

PT_HOST_DEVICE int32_t next_in_chain(TreeWalk& walk, int32_t& child) {
  child = walk.first_child();
  if (child >= 0 && walk.next_sibling(child) >= 0) walk.status |= kMalformedTree;
  return child >= 0 ? walk.token_of(child) : -1;
}

// Returns the residual if the chain is cut before `token`; `weight` is the prefix's.
template <typename Rows>
PT_HOST_DEVICE Residual cut_before(const RatioParams& p, Rows& rows, const NodeDistributions& distributions,
                                   int32_t token, double weight) {
  Residual left{0.0, distributions.total, 1.0};
  if (token < 0) return left;
  if (p.law == DraftLaw::kOneHot) {  // the draft's whole distribution
    rows.mark_tried(token);
  } else {
    left.c = distributions.total / weight;
  }
  left.mass = kNotSummed;
  return left;
}

// Traverses the chain twice: to its end to judge it, then to the cut.
template <typename Rows>
PT_HOST_DEVICE void walk_block(const RatioParams& p, int64_t b, Rows& rows) {
  TreeWalk walk(p.verify, b);
  rows.begin(walk);
  NodeDistributions& distributions = rows.distributions();
  const bool one_hot = p.law == DraftLaw::kOneHot;
  // Rejected nodes consume coins, which the next step must not reuse: coins use the root's position, numbered by node.
  int32_t child = -1, accepted = 0;
  double weight = 1.0, accepted_weight = 1.0;
  bool judging = true;
  for (bool more = walk.num_nodes > 0; more;) {
    int32_t token = next_in_chain(walk, child);
    // No smaller weight can be accepted.
    if (judging ? weight > kLeastWeight : walk.depth == accepted) {
      rows.open(p, b, walk.row(), !one_hot && token >= 0, distributions);
      if (distributions.target.bad) walk.status |= kBadRow;
      Residual left = cut_before(p, rows, distributions, token, weight);
      if (!judging) {
        token = draw_rest(p, b, position_at(distributions.root_position, walk.depth), rows, distributions, left);
      } else {
        double h = weight;
        if (token >= 0 && walk.depth > 0) {
          h = acceptance_of(weight * rows.sums(distributions, left.c).residual / distributions.total, weight);
        }
        if (walk.depth > 0 && coin_of(p, b, walk.row(), distributions.root_position, walk.node) < h) {
          accepted = walk.depth;
          accepted_weight = weight;
        }
        const double q = token < 0 ? 0.0 : one_hot ? 1.0 : rows.draft(distributions, token);
        weight = q > 0.0 ? min_of(weight * rows.target(distributions, token) / (distributions.total * q), 1.0) : 0.0;
      }
    }
    if (!judging) {
      if (rows.leads()) walk.emit(token);
      more = walk.depth < accepted && walk.descend(child);
    } else if (!walk.descend(child)) {
      judging = false;
      weight = accepted_weight;
      walk.node = walk.depth = 0;
    }
  }
  rows.finish(walk);
}

}  // namespace pagedtree
