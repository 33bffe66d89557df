// Traversal verification of a tree (Weng et al., 2025, arXiv 2505.12398): judges a node after all its descendants,
// leaves first, by the joint probability of its path. On a chain it is block verification.
// weight(child) = min(weight * residual(x) / q(x), 1); accept a node if coin < weight, else reject it at its parent
#pragma once

#include "core/verify/block.h"

namespace pagedtree {

struct TraversalState {
  Residual left;
  double weight;  // probability that the path is accepted, given all verdicts so far
  int32_t node;
  int32_t child;  // last judged child, -1: none
};

struct TraversalFrame {
  NodeDistributions distributions;
  TraversalState state;
};

template <typename Rows>
struct Traversal {
  const RatioParams& p;
  TreeWalk walk;
  Rows& rows;
  int32_t depth = 0;  // of the node in `at`
  TraversalState at{};
  bool is_open = false;  // that node's distributions are known

  // Returns a frame, which only the leading thread writes.
  PT_HOST_DEVICE TraversalFrame& frame(int32_t d) const { return p.frames[walk.b * (p.verify.max_depth + 1) + d]; }
  PT_HOST_DEVICE const NodeDistributions& distributions() const { return rows.distributions(); }
  PT_HOST_DEVICE int32_t node_at(int32_t d) const { return d == depth ? at.node : frame(d).state.node; }
  PT_HOST_DEVICE int32_t token_of(int32_t node) const { return walk.token_of(node); }

  // Returns the next child that drafted a token, -1 if none.
  PT_HOST_DEVICE int32_t next_child(int32_t node, int32_t child) {
    walk.node = node;
    child = child < 0 ? walk.first_child() : walk.next_sibling(child);
    while (child >= 0 && token_of(child) < 0) child = walk.next_sibling(child);
    return child;
  }

  PT_HOST_DEVICE void open(bool has_child) {
    rows.open(p, walk.b, walk.rows.begin + at.node, has_child, rows.distributions());
    at.left = {0.0, distributions().total, 1.0};
    is_open = true;
    if (distributions().target.bad) walk.status |= kBadRow;
  }

  PT_HOST_DEVICE void enter(int32_t node, double weight) {
    at = {{}, weight, node, -1};
    is_open = false;
  }

  PT_HOST_DEVICE void descend(int32_t child, double weight) {
    rows.sync();
    if (rows.leads()) {
      frame(depth).distributions = distributions();
      frame(depth).state = at;
    }
    rows.sync();
    ++depth;
    enter(child, weight);
  }

  PT_HOST_DEVICE void ascend() {
    --depth;
    rows.sync();
    if (rows.leads_cta()) rows.distributions() = frame(depth).distributions;
    rows.sync();
    at = frame(depth).state;
    is_open = true;
    rows.open_again(p, walk.b, walk.rows.begin + at.node);
  }

  PT_HOST_DEVICE double weight_of_child(int32_t child) const {
    const int32_t token = token_of(child);
    const double q = rows.is_tried(token) ? 0.0 : rows.draft(distributions(), token);
    if (!(q > 0.0) || !(at.left.mass > 0.0)) return 0.0;
    const double r = rows.residual(distributions(), at.left.c, token);
    return min_of(at.weight * r * at.left.draft_mass / (at.left.mass * q), 1.0);
  }

  // Rejects at.child after its whole subtree.
  PT_HOST_DEVICE void reject_child() {
    if (!(at.weight > kLeastWeight) || !(at.left.mass > 0.0)) return;
    rows.clear_tried();
    if (p.law == DraftLaw::kSwor) {
      for (int32_t c = -1; (c = next_child(at.node, c)) >= 0 && c < at.child;) rows.mark_tried(token_of(c));
    }
    const double before = at.left.mass;
    subtract_draft(p, rows, distributions(), token_of(at.child), at.weight, at.left);
    const double z = at.weight * at.left.mass / before;
    at.weight = at.node == 0 ? 1.0 : acceptance_of(z, at.weight);
  }

  // Moves to the node whose path is accepted, and opens it.
  PT_HOST_DEVICE void find_end() {
    enter(0, 1.0);
    for (bool accepted = false;;) {
      const int32_t child = next_child(at.node, at.child);
      // A leaf's row is read only on acceptance.
      if (!is_open && (accepted || child >= 0)) open(child >= 0);
      if (accepted) return;
      if (child >= 0) {
        at.child = child;
        const double weight = weight_of_child(child);
        if (depth == p.verify.max_depth) walk.status |= kMalformedTree;
        if (weight > kLeastWeight && depth < p.verify.max_depth) {
          descend(child, weight);
          continue;
        }
      } else if (depth == 0 ||
                 coin_of(p, walk.b, walk.rows.begin + at.node, distributions().root_position, at.node) < at.weight) {
        accepted = true;
        continue;
      } else {
        ascend();
      }
      reject_child();
    }
  }
};

template <typename Rows>
PT_HOST_DEVICE void walk_traversal(const RatioParams& p, int64_t b, Rows& rows) {
  Traversal<Rows> t{p, TreeWalk(p.verify, b), rows};
  rows.begin(t.walk);
  if (t.walk.num_nodes > 0) {
    t.find_end();
    const int32_t bonus =
        draw_rest(p, b, position_at(t.distributions().root_position, t.depth), rows, t.distributions(), t.at.left);
    for (t.walk.depth = 0; rows.leads(); ++t.walk.depth) {
      t.walk.node = t.node_at(t.walk.depth);
      t.walk.emit(t.walk.depth == t.depth ? bonus : t.token_of(t.node_at(t.walk.depth + 1)));
      if (t.walk.depth == t.depth) break;
    }
  }
  rows.finish(t.walk);
}

}  // namespace pagedtree
