// Block verification of a chain (Sun et al., ICLR 2025): the longest prefix whose coin allows it, judged by the joint
// probability of its tokens instead of each token's own.
#pragma once

#include "core/verify/rules.h"

namespace pagedtree {

// A weight below it is none: its inverse stays finite.
constexpr double kLeastWeight = 1e-200;

// h = z / (z + 1 - weight), 0 / 0 counting as its limit, whatever rounding makes of it.
PT_HOST_DEVICE double acceptance_of(double z, double weight) {
  const double whole = z + (1.0 - weight);
  return whole > kRounding ? z / whole : 1.0;
}

// Draft tokens of a chain's node: the first child's, -1 where the chain ends.
PT_HOST_DEVICE int64_t next_in_chain(const RatioParams& p, TreeWalk& walk, int32_t& child) {
  child = walk.first_child();
  if (child >= 0 && walk.next_sibling(child) >= 0) walk.status |= kMalformedTree;
  return child >= 0 ? draft_token_at(p.verify, walk.rows.begin + child) : -1;
}

// What is left at a node whose prefix has `weight`, when `token` follows it and the chain is cut before that.
template <typename Rows>
PT_HOST_DEVICE Residual cut_before(const RatioParams& p, Rows& rows, const NodeLaws& laws, int64_t token,
                                   double weight) {
  Residual left{0.0, laws.total, 1.0};
  if (token < 0) return left;
  if (p.law == DraftLaw::kOneHot) {  // the draft's law is the token's alone
    rows.mark_tried(token);
  } else {
    left.c = laws.total / weight;
  }
  left.mass = kNotSummed;
  return left;
}

// Goes down the chain twice: to its end, judging, then to the node behind which it is cut.
template <typename Rows>
PT_HOST_DEVICE void walk_block(const RatioParams& p, int64_t b, Rows& rows) {
  TreeWalk walk(p.verify, b);
  if (rows.leads()) walk.begin();
  NodeLaws& laws = rows.laws();
  const bool one_hot = p.law == DraftLaw::kOneHot;
  const int64_t position = position_at(p, b, 0);  // coins past the accepted prefix are spent, so never those of a node
  int32_t child = -1, accepted = 0;
  double weight = 1.0, accepted_weight = 1.0;
  bool judging = true, alive = true;  // not alive: nothing from here on can be accepted
  for (bool more = walk.num_nodes > 0; more;) {
    int64_t token = next_in_chain(p, walk, child);
    if (judging ? alive : walk.depth == accepted) {
      rows.open(p, b, walk.row(), !one_hot && token >= 0, laws);
      if (laws.target.bad) walk.status |= kBadRow;
      Residual left = cut_before(p, rows, laws, token, judging ? weight : accepted_weight);
      if (!judging) {
        token = draw_rest(p, b, position_at(p, b, walk.depth), rows, laws, left);
      } else {
        double h = weight;
        if (token >= 0 && walk.depth > 0) {
          h = acceptance_of(weight * rows.sums(laws, left.c).residual / laws.total, weight);
        }
        if (walk.depth > 0 && coin_of(p, b, walk.row(), position, walk.node) < h) {
          accepted = walk.depth;
          accepted_weight = weight;
        }
        const double q = token < 0 ? 0.0 : one_hot ? 1.0 : rows.draft(laws, token);
        weight = q > 0.0 ? min_of(weight * rows.target(laws, token) / (laws.total * q), 1.0) : 0.0;
        alive = weight > kLeastWeight;
      }
    }
    if (!judging) {
      if (rows.leads()) walk.emit(token);
      more = walk.depth < accepted && walk.descend(child);
    } else if (!walk.descend(child)) {
      judging = false;
      walk.node = walk.depth = 0;
    }
  }
  if (rows.leads()) walk.finish();
}

}  // namespace pagedtree
