// Rejection sampling along a draft tree: single drafts (Leviathan et al., ICML 2023; Chen et al., 2023), siblings in
// turn (SpecInfer, ASPLOS 2024; without replacement: Sequoia, NeurIPS 2024).
#pragma once

#include "core/verify/rules.h"

namespace pagedtree {

// Judges drawn children, each with a separate coin. Returns the accepted child or -1.
template <typename Rows>
PT_HOST_DEVICE int32_t judge_in_turn(const RatioParams& p, TreeWalk& walk, Rows& rows,
                                     const NodeDistributions& distributions, int64_t position, Residual& left) {
  int32_t rank = 0;
  for (int32_t child = walk.first_child(); child >= 0; child = walk.next_sibling(child), ++rank) {
    const int64_t row = walk.rows.begin + child;
    const int32_t token = walk.token_of(child);
    if (token < 0) continue;
    const double q = rows.is_tried(token) ? 0.0 : rows.draft(distributions, token);
    const double r = rows.residual(distributions, left.c, token);
    const double u = coin_of(p, walk.b, row, position, rank);
    if (q > 0.0 && r > 0.0 && u * q * left.mass < r * left.draft_mass) return child;
    subtract_draft(p, rows, distributions, token, 1.0, left);
    if (!(left.mass > 0.0)) return -1;
  }
  return -1;
}

// Judges children that were not drawn; intervals of their probabilities share a coin. Returns the accepted child or -1.
template <typename Rows>
PT_HOST_DEVICE int32_t judge_exclusive(const RatioParams& p, TreeWalk& walk, Rows& rows,
                                       const NodeDistributions& distributions, int64_t position, Residual& left) {
  const double bound = coin_of(p, walk.b, walk.row(), position, 0) * distributions.total;
  double cumulative = 0.0;
  for (int32_t child = walk.first_child(); child >= 0; child = walk.next_sibling(child)) {
    const int32_t token = walk.token_of(child);
    if (token < 0 || rows.is_tried(token)) continue;
    const double mass = rows.target(distributions, token);
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
  rows.begin(walk);
  const bool exclusive = p.law == DraftLaw::kOneHot;
  NodeDistributions& distributions = rows.distributions();
  for (bool more = walk.num_nodes > 0; more;) {
    rows.open(p, b, walk.row(), !exclusive && walk.first_child() >= 0, distributions);
    if (distributions.target.bad) walk.status |= kBadRow;
    const int64_t position = position_at(distributions.root_position, walk.depth);
    Residual left{0.0, distributions.total, 1.0};
    const int32_t child = exclusive ? judge_exclusive(p, walk, rows, distributions, position, left)
                                    : judge_in_turn(p, walk, rows, distributions, position, left);
    const int32_t token = child >= 0 ? walk.token_of(child) : draw_rest(p, b, position, rows, distributions, left);
    if (rows.leads()) walk.emit(token);
    more = walk.descend(child);
  }
  rows.finish(walk);
}

}  // namespace pagedtree
