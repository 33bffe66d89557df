// Block verification of a chain (Sun et al., ICLR 2025): the longest prefix whose coin allows it, judged by the joint
// probability of its tokens instead of each token's own.
#pragma once

#include "core/verify/rules.h"

namespace pagedtree {

// Smaller weights count as 0, so that the inverse of a weight is finite.
constexpr double kLeastWeight = 1e-200;

// h = z / (z + 1 - weight). 0 / 0 counts as its limit, also where rounding leaves a little more than 0.
PT_HOST_DEVICE double acceptance_of(double z, double weight) {
  const double whole = z + (1.0 - weight);
  return whole > kRounding ? z / whole : 1.0;
}

// The draft token that follows a chain's node: its first child's, -1 if the chain ends.
PT_HOST_DEVICE int32_t next_in_chain(TreeWalk& walk, int32_t& child) {
  child = walk.first_child();
  if (child >= 0 && walk.next_sibling(child) >= 0) walk.status |= kMalformedTree;
  return child >= 0 ? walk.token_of(child) : -1;
}

// The residual at a node whose prefix has `weight`, if the chain is cut between the node and `token`.
template <typename Rows>
PT_HOST_DEVICE Residual cut_before(const RatioParams& p, Rows& rows, const NodeDistributions& distributions,
                                   int32_t token, double weight) {
  Residual left{0.0, distributions.total, 1.0};
  if (token < 0) return left;
  if (p.law == DraftLaw::kOneHot) {  // the draft's distribution is this token alone
    rows.mark_tried(token);
  } else {
    left.c = distributions.total / weight;
  }
  left.mass = kNotSummed;
  return left;
}

// Goes down the chain twice: to its end, to judge it, then to the node after which it is cut.
template <typename Rows>
PT_HOST_DEVICE void walk_block(const RatioParams& p, int64_t b, Rows& rows) {
  TreeWalk walk(p.verify, b);
  rows.begin(walk);
  NodeDistributions& distributions = rows.distributions();
  const bool one_hot = p.law == DraftLaw::kOneHot;
  // The coins of nodes past the accepted prefix are used up as well, so they must not be those that the next step uses
  // at these nodes' positions: all coins are of the root's position, numbered by node.
  int32_t child = -1, accepted = 0;
  double weight = 1.0, accepted_weight = 1.0;
  bool judging = true;
  for (bool more = walk.num_nodes > 0; more;) {
    int32_t token = next_in_chain(walk, child);
    // With less weight nothing more can be accepted.
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
