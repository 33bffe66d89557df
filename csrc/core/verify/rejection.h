// Rejection sampling along a draft tree: token by token (Leviathan et al., ICML 2023; Chen et al., 2023), several
// siblings in turn (SpecInfer, ASPLOS 2024; without replacement: Sequoia, NeurIPS 2024).
#pragma once

#include "core/verify/rules.h"

namespace pagedtree {

// Children that were drawn, each with a coin of its own: the accepted one, -1 if none.
template <typename Rows>
PT_HOST_DEVICE int32_t judge_in_turn(const RatioParams& p, TreeWalk& walk, Rows& rows, const NodeLaws& laws,
                                     int64_t position, Residual& left) {
  int32_t rank = 0;
  for (int32_t child = walk.first_child(); child >= 0; child = walk.next_sibling(child), ++rank) {
    const int64_t row = walk.rows.begin + child;
    const int64_t token = draft_token_at(p.verify, row);
    if (token < 0) continue;
    const double q = rows.is_tried(token) ? 0.0 : rows.draft(laws, token);
    const double r = rows.residual(laws, left.c, token);
    const double u = coin_of(p, walk.b, row, position, rank);
    if (q > 0.0 && r > 0.0 && u * q * left.mass < r * left.draft_mass) return child;
    subtract_draft(p, rows, laws, token, 1.0, left);
    if (!(left.mass > 0.0)) return -1;
  }
  return -1;
}

// Children that were chosen without chance share the node's coin: each has the interval of its own probability.
template <typename Rows>
PT_HOST_DEVICE int32_t judge_exclusive(const RatioParams& p, TreeWalk& walk, Rows& rows, const NodeLaws& laws,
                                       int64_t position, Residual& left) {
  const double bound = coin_of(p, walk.b, walk.row(), position, 0) * laws.total;
  double cumulative = 0.0;
  for (int32_t child = walk.first_child(); child >= 0; child = walk.next_sibling(child)) {
    const int64_t token = draft_token_at(p.verify, walk.rows.begin + child);
    if (token < 0 || rows.is_tried(token)) continue;
    const double mass = rows.target(laws, token);
    cumulative += mass;
    if (mass > 0.0 && cumulative > bound) return child;
    rows.mark_tried(token);
    left.mass = kNotSummed;
  }
  return -1;
}

template <typename Rows>
PT_HOST_DEVICE void walk_rejection(const RatioParams& p, int64_t b, Rows& rows) {
  TreeWalk walk(p.verify, b);
  if (rows.leads()) walk.begin();
  const bool exclusive = p.law == DraftLaw::kOneHot;
  NodeLaws& laws = rows.laws();
  for (bool more = walk.num_nodes > 0; more;) {
    rows.open(p, b, walk.row(), !exclusive && walk.first_child() >= 0, laws);
    if (laws.target.bad) walk.status |= kBadRow;
    const int64_t position = position_at(p, b, walk.depth);
    Residual left{0.0, laws.total, 1.0};
    const int32_t child = exclusive ? judge_exclusive(p, walk, rows, laws, position, left)
                                    : judge_in_turn(p, walk, rows, laws, position, left);
    const int64_t token =
        child >= 0 ? draft_token_at(p.verify, walk.rows.begin + child) : draw_rest(p, b, position, rows, laws, left);
    if (rows.leads()) walk.emit(token);
    more = walk.descend(child);
  }
  if (rows.leads()) walk.finish();
}

}  // namespace pagedtree
