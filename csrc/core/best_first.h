// Best-first tree: repeatedly adds the most probable child outside the tree; last dimensions are contiguous.
// joint(child) = joint(parent) + min(log_prob, 0)
#pragma once

#include "core/drafting.h"
#include "core/tree.h"

namespace pagedtree {

struct BestFirstTreeParams {
  const float* log_probs;      // [B, H, K]
  const int64_t* tokens;       // [B, H, K]
  const int64_t* root_tokens;  // [B]
  int64_t* draft_tokens;       // [B * num_nodes] out
  float* joints;               // [B * num_nodes] out, log-probabilities of the paths
  TreeOutput trees;            // B * num_nodes rows out
  int64_t batch;
  int64_t log_probs_stride, log_probs_level_stride;
  int64_t tokens_stride, tokens_level_stride;
  int32_t num_levels;      // H
  int32_t num_candidates;  // K
  int32_t num_nodes;       // at most kMaxTreeNodes
};

// Orders the children of one node: most probable first, ties by lower rank.
struct alignas(8) RankedChild {
  float joint;   // log-probability of its path; -inf: no child
  int32_t rank;  // index among the candidates of its level
  PT_HOST_DEVICE bool comes_before(RankedChild other) const {
    return joint > other.joint || (joint == other.joint && rank < other.rank);
  }
};

// Sentinels before and after every child.
constexpr RankedChild kBeforeAll{kInfinity, -1}, kNoChild{-kInfinity, -1};

// Returns the first child after `last` among ranks begin, begin + step, ... Sums round to fp32, so different candidates
// may tie: compare sums, never candidates. No sum exceeds `joint`, because rounding is monotonic.
PT_HOST_DEVICE RankedChild child_after(const float* log_probs, int32_t num_candidates, float joint, RankedChild last,
                                       int32_t begin, int32_t step) {
  RankedChild best = kNoChild;
  for (int32_t rank = begin; rank < num_candidates; rank += step) {
    const float log_prob = log_probs[rank];
    if (!is_present(log_prob)) continue;
    const RankedChild child{joint + min_of(log_prob, 0.0f), rank};
    if (child.joint > best.joint && last.comes_before(child)) best = child;
  }
  return best;
}

// Returns true if `log_prob` may precede `next` in a descending level. Absent candidates come last.
PT_HOST_DEVICE bool in_order(float log_prob, float next) {
  return !is_present(next) || (is_present(log_prob) && min_of(log_prob, 0.0f) >= min_of(next, 0.0f));
}

PT_HOST_DEVICE RankedChild child_of(float joint, float log_prob, int32_t rank) {
  return is_present(log_prob) ? RankedChild{joint + min_of(log_prob, 0.0f), rank} : kNoChild;
}

// Returns child_after() in a descending level: rounding keeps the order, so the next rank comes next.
PT_HOST_DEVICE RankedChild child_in_order(const float* log_probs, int32_t num_candidates, float joint,
                                          RankedChild last) {
  const int32_t rank = last.rank + 1;
  return rank < num_candidates ? child_of(joint, log_probs[rank], rank) : kNoChild;
}

struct BestFirstTree {
  float joints[kMaxTreeNodes];
  RankedChild next[kMaxTreeNodes];  // best child that is not in the tree
  int32_t ranks[kMaxTreeNodes];
  int16_t parents[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];
  int16_t last_child[kMaxTreeNodes];
  int32_t out_of_order[kMaxTreeNodes];  // per level: nonzero if not in descending order

  // Orders next[a] and next[b]: more probable, then shallower, then lower ranks from the root down.
  PT_HOST_DEVICE bool comes_before(int32_t a, int32_t b) const {
    RankedChild left = next[a], right = next[b];
    if (left.joint != right.joint) return left.joint > right.joint;
    if (depths[a] != depths[b]) return depths[a] < depths[b];
    for (; a != b; a = parents[a], b = parents[b]) {
      left.rank = ranks[a];
      right.rank = ranks[b];
    }
    return left.rank < right.rank;
  }

  PT_HOST_DEVICE void append(int32_t node, int32_t parent, int32_t depth, RankedChild child) {
    joints[node] = child.joint;
    ranks[node] = child.rank;
    parents[node] = static_cast<int16_t>(parent);
    depths[node] = static_cast<int16_t>(depth);
  }
};

PT_HOST_DEVICE int32_t reachable_levels(const BestFirstTreeParams& p) { return min_of(p.num_levels, p.num_nodes - 1); }

PT_HOST_DEVICE const float* level_after(const BestFirstTreeParams& p, int64_t b, int32_t depth) {
  return p.log_probs + b * p.log_probs_stride + depth * p.log_probs_level_stride;
}

// Clears rows from `size` on. The caller writes the node's links.
PT_HOST_DEVICE void write_best_first(const BestFirstTreeParams& p, int64_t b, const BestFirstTree& tree, int32_t size,
                                     int32_t node) {
  const int64_t row = b * p.num_nodes + node;
  if (node >= size) {
    p.draft_tokens[row] = -1;
    p.joints[row] = -kInfinity;
    clear_row(p.trees, row);
    return;
  }
  const int32_t depth = tree.depths[node];
  p.draft_tokens[row] = node == 0
                            ? p.root_tokens[b]
                            : p.tokens[b * p.tokens_stride + (depth - 1) * p.tokens_level_stride + tree.ranks[node]];
  p.joints[row] = tree.joints[node];
  p.trees.parents[row] = tree.parents[node];
  p.trees.depths[row] = depth;
  write_ancestors(p.trees.mask + row * p.trees.mask_words, p.trees.mask_words, tree.parents, node);
}

}  // namespace pagedtree
