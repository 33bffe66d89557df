// Traversal verification of a tree (Weng et al., 2025, arXiv 2505.12398): leaves first, a node after all its
// descendants, judged by the joint probability of its path. On a chain it is block verification.
#pragma once

#include "core/block.h"

namespace pagedtree {

// A node on the way from the root to where the traversal stands.
struct TraversalFrame {
  NodeLaws laws;
  Residual left;
  double weight;  // the probability that its path is accepted, all that was judged so far given
  int32_t node;
  int32_t child;  // the last one that was judged, -1: none
  bool is_open;   // the laws are known
};

template <typename Rows>
struct Traversal {
  const RatioParams& p;
  TreeWalk walk;
  Rows& rows;

  PT_HOST_DEVICE int64_t token_of(int32_t node) const { return draft_token_at(p.verify, walk.rows.begin + node); }

  // The child behind `child` that drafted a token, -1 if none.
  PT_HOST_DEVICE int32_t next_child(int32_t node, int32_t child) {
    walk.node = node;
    child = child < 0 ? walk.first_child() : walk.next_sibling(child);
    while (child >= 0 && token_of(child) < 0) child = walk.next_sibling(child);
    return child;
  }

  PT_HOST_DEVICE void open(TraversalFrame& frame) {
    frame.laws = rows.open(p, walk.b, walk.rows.begin + frame.node, next_child(frame.node, -1) >= 0);
    frame.left = {0.0, frame.laws.total, 1.0};
    frame.is_open = true;
    if (frame.laws.target.bad) walk.status |= kBadRow;
  }

  // A leaf's row is read only if the leaf is accepted.
  PT_HOST_DEVICE void enter(TraversalFrame& frame, int32_t node, double weight) {
    frame.weight = weight;
    frame.node = node;
    frame.child = -1;
    frame.is_open = false;
    if (next_child(node, -1) >= 0) open(frame);
  }

  // The weight of the path that goes on to `child`.
  PT_HOST_DEVICE double weight_of_child(const TraversalFrame& frame, int32_t child) const {
    const int64_t token = token_of(child);
    const double q = rows.is_tried(token) ? 0.0 : rows.draft(frame.laws, token);
    if (!(q > 0.0) || !(frame.left.mass > 0.0)) return 0.0;
    const double r = rows.residual(frame.laws, frame.left.c, token);
    return min_of(frame.weight * r * frame.left.draft_mass / (frame.left.mass * q), 1.0);
  }

  // Nothing below frame.child was accepted, nor that child.
  PT_HOST_DEVICE void reject_child(TraversalFrame& frame) {
    if (!(frame.weight > kLeastWeight) || !(frame.left.mass > 0.0)) return;
    rows.clear_tried();
    if (p.law == DraftLaw::kSwor) {
      for (int32_t c = next_child(frame.node, -1); c >= 0 && c < frame.child; c = next_child(frame.node, c)) {
        rows.mark_tried(token_of(c));
      }
    }
    const double before = frame.left.mass;
    subtract_draft(p, rows, frame.laws, token_of(frame.child), frame.weight, frame.left);
    const double z = frame.weight * frame.left.mass / before;
    frame.weight = frame.node == 0 ? 1.0 : acceptance_of(z, frame.weight);
  }

  PT_HOST_DEVICE void accept(TraversalFrame* frames, int32_t depth) {
    TraversalFrame& last = frames[depth];
    if (!last.is_open) open(last);
    const int64_t bonus = draw_rest(p, walk.b, position_at(p, walk.b, depth), rows, last.laws, last.left);
    for (walk.depth = 0;; ++walk.depth) {
      walk.node = frames[walk.depth].node;
      if (rows.leads()) walk.emit(walk.depth == depth ? bonus : token_of(frames[walk.depth + 1].node));
      if (walk.depth == depth) return;
    }
  }
};

template <typename Rows>
PT_HOST_DEVICE void walk_traversal(const RatioParams& p, int64_t b, Rows& rows) {
  Traversal<Rows> t{p, TreeWalk(p.verify, b), rows};
  if (rows.leads()) t.walk.begin();
  TraversalFrame* frames = rows.frames();
  const int64_t position = position_at(p, b, 0);
  int32_t depth = 0;
  if (t.walk.num_nodes > 0) t.enter(frames[0], 0, 1.0);
  for (bool more = t.walk.num_nodes > 0; more;) {
    TraversalFrame& frame = frames[depth];
    const int32_t child = frame.is_open ? t.next_child(frame.node, frame.child) : -1;
    if (child >= 0) {
      frame.child = child;
      const double weight = t.weight_of_child(frame, child);
      if (depth == p.verify.max_depth) t.walk.status |= kMalformedTree;
      if (weight > kLeastWeight && depth < p.verify.max_depth) {
        t.enter(frames[++depth], child, weight);
      } else {
        t.reject_child(frame);
      }
    } else if (depth == 0 || coin_of(p, b, t.walk.rows.begin + frame.node, position, frame.node) < frame.weight) {
      t.accept(frames, depth);
      more = false;
    } else {
      t.reject_child(frames[--depth]);
    }
  }
  if (rows.leads()) t.walk.finish();
}

}  // namespace pagedtree
