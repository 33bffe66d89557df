// Typical acceptance (Medusa: Cai et al., ICML 2024): deterministic, uses no draft probabilities, not lossless.
// accept x if p(x) > min(epsilon, delta * exp(-entropy(p))); keep the longest accepted path
#pragma once

#include "core/verify/rules.h"

namespace pagedtree {

// Accepting parent and depth of each node, -1 if not accepted.
struct AcceptedNodes {
  int16_t* parents;  // [kMaxTreeNodes]
  int16_t* depths;   // [kMaxTreeNodes]
};

template <typename Rows>
PT_HOST_DEVICE double typical_bound(const RatioParams& p, Rows& rows, const NodeDistributions& distributions) {
  const float by_entropy = p.delta * exp_exact<ScalarMath>(static_cast<float>(-rows.entropy(distributions)));
  return static_cast<double>(min_of(p.epsilon, by_entropy)) * distributions.total;
}

template <typename Rows>
PT_HOST_DEVICE void walk_typical(const RatioParams& p, int64_t b, Rows& rows) {
  TreeWalk walk(p.verify, b);
  rows.begin(walk);
  if (walk.num_nodes == 0) {
    rows.finish(walk);
    return;
  }
  NodeDistributions& distributions = rows.distributions();
  const AcceptedNodes nodes = rows.accepted_nodes();
  if (rows.leads_cta()) {
    PT_NO_UNROLL
    for (int32_t node = 0; node < walk.num_nodes; ++node) nodes.parents[node] = nodes.depths[node] = -1;
    nodes.depths[0] = 0;
  }
  rows.sync();
  int32_t best = 0;
  for (int32_t node = 0; node <= walk.num_nodes; ++node) {
    const bool last = node == walk.num_nodes;  // the path is known; its last row is read
    walk.node = last ? best : node;
    const int32_t depth = nodes.depths[walk.node];
    if (depth < 0) continue;
    if (depth > nodes.depths[best]) best = node;
    int32_t child = walk.first_child();
    if (!last && child < 0) continue;
    if (!last && depth == p.verify.max_depth) {
      walk.status |= kMalformedTree;
      continue;
    }
    rows.open(p, b, walk.row(), false, distributions);
    if (distributions.target.bad) walk.status |= kBadRow;
    if (last) break;
    const double bound = typical_bound(p, rows, distributions);
    for (; child >= 0; child = walk.next_sibling(child)) {
      const int32_t token = walk.token_of(child);
      if (token < 0 || !(rows.target(distributions, token) > bound)) continue;
      if (!rows.leads_cta() || nodes.depths[child] >= 0) continue;
      nodes.parents[child] = static_cast<int16_t>(node);
      nodes.depths[child] = static_cast<int16_t>(depth + 1);
    }
    rows.sync();
  }

  int32_t token = distributions.target.best;
  for (walk.node = best; walk.node >= 0; walk.node = nodes.parents[walk.node]) {
    walk.depth = nodes.depths[walk.node];
    if (rows.leads()) walk.emit(token);
    token = walk.token_of(walk.node);
  }
  walk.depth = nodes.depths[best];
  rows.finish(walk);
}

}  // namespace pagedtree
