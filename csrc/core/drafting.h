// Growth of a draft tree by levels, and the choice of its best nodes (EAGLE-2).
// score(child) = score(parent) + log p(token | path)
#pragma once

#include "core/sampling.h"

namespace pagedtree {

enum class GrowthLaw : int32_t { kTopK, kIid, kSwor, kCoupled };

// Adds K children to each of F frontier nodes among C candidates, then chooses a frontier of G; B sequences.
struct ExpandTreeParams {
  const int64_t* tokens;    // [B, C]
  const int32_t* parents;   // [B, C] candidate, -1 at the root
  const float* scores;      // [B, C] cumulative log-probability, -inf = absent
  const int32_t* kv_index;  // [B, C] index in the draft model's tree, -1 = not fed
  const int32_t* frontier;  // [B, F] candidates
  const int32_t* mask;      // [B * F, mask_words] visible nodes of the draft model's tree
  LogitsParams logits;      // B * F rows
  SamplingParams sampling;  // of B; null under kTopK, like the next two
  const int64_t* seeds;     // [B]
  Integers positions;       // [B] of the roots
  int64_t* out_tokens;      // [B, C + F * K] out
  int32_t* out_parents;     // [B, C + F * K] out
  float* out_scores;        // [B, C + F * K] out
  int32_t* out_kv_index;    // [B, C + F * K] out
  int32_t* out_frontier;    // [B, G] out
  int32_t* out_mask;        // [B * G, mask_words] out
  float* draft_probs;       // [B * F, V] out, not under kTopK
  float* frontier_scores;   // [B, G] scratch
  int64_t batch;
  int64_t num_candidates;  // C
  GrowthLaw law;
  int32_t level;         // depth of the frontier
  int32_t num_expanded;  // F
  int32_t num_children;  // K
  int32_t num_frontier;  // G
  int32_t num_kv;        // nodes in the draft model's tree, frontier included
  int32_t mask_words;
};

struct RerankTreeParams {
  const int64_t* tokens;    // [B, C]
  const int32_t* parents;   // [B, C]
  const float* scores;      // [B, C]
  const int32_t* kv_index;  // [B, C]
  const uint8_t* active;    // [B] or null
  int64_t* draft_tokens;    // [B * num_nodes] out
  int32_t* out_parents;     // [B * num_nodes] out
  int32_t* cu_nodes;        // [B + 1] out
  int32_t* node_map;        // [B * num_nodes] out
  float* best_scores;       // [B, num_nodes] scratch
  int32_t* best;            // [B, num_nodes] scratch
  int32_t* node_of;         // [B, C] scratch
  int64_t batch;
  int64_t num_candidates;  // C
  int32_t num_nodes;
  bool by_score;  // else the first candidates
};

struct MedusaProposeParams {
  LogitsParams head_logits;    // B rows of head 0; strided by head_stride elements per head
  const int32_t* parents;      // [n] one tree for all sequences
  const int32_t* depths;       // [n]
  const int32_t* child_ranks;  // [n]
  const int64_t* root_tokens;  // [B] or null
  const uint8_t* active;       // [B] or null
  int64_t* draft_tokens;       // [B * n] out
  int32_t* out_parents;        // [B * n] out
  int32_t* cu_nodes;           // [B + 1] out
  int64_t* top_tokens;         // [B, H, num_top] scratch
  float* top_scores;           // [B, H, num_top] scratch
  int64_t batch;
  int64_t head_stride;
  int32_t num_heads;  // H
  int32_t num_nodes;  // n
  int32_t num_top;
};

// Returns false for -inf and NaN, which mark absent nodes.
PT_HOST_DEVICE bool is_present(float score) { return score > -kInfinity; }

// Inserts into the `capacity` best of a stream: higher scores first, ties in order of arrival. Returns the new size.
template <typename Id>
PT_HOST_DEVICE int32_t insert_ranked(float* scores, Id* ids, int32_t size, int32_t capacity, float score, Id id) {
  if (size == capacity && (capacity == 0 || !(score > scores[size - 1]))) return size;
  int32_t at = min_of(size, capacity - 1);
  for (; at > 0 && score > scores[at - 1]; --at) {
    scores[at] = scores[at - 1];
    ids[at] = ids[at - 1];
  }
  scores[at] = score;
  ids[at] = id;
  return min_of(size + 1, capacity);
}

// One node's children: independent tokens (kIid), or distinct tokens in order of their draw, with separate noise
// (kSwor) or the target's sampling noise at the node (kCoupled).
struct ChildrenDraw {
  GrowthLaw law;
  int32_t count;
  uint64_t seed;
  int64_t position;
  RandomUse use;
  int64_t* tokens;  // [count] out, -1 if none
  float* scores;    // [count] out, log-probabilities, -inf if none
  float* probs;     // [V] out
};

// Returns the target's noise under "coupled": it is equal for all nodes at a position.
PT_HOST_DEVICE RandomUse use_of_children(GrowthLaw law, int64_t f) {
  return law == GrowthLaw::kCoupled ? RandomUse::kGumbel : draft_use(f);
}

PT_HOST_DEVICE int64_t first_child_of(const ExpandTreeParams& p, int64_t b, int64_t f) {
  const int64_t width = p.num_candidates + int64_t{p.num_expanded} * p.num_children;
  return b * width + p.num_candidates + f * p.num_children;
}

// Returns -inf if the frontier names no candidate.
PT_HOST_DEVICE float frontier_score(const ExpandTreeParams& p, int64_t b, int64_t f) {
  const int32_t candidate = p.frontier[b * p.num_expanded + f];
  if (candidate < 0 || candidate >= p.num_candidates) return -kInfinity;
  const float score = p.scores[b * p.num_candidates + candidate];
  return is_present(score) ? score : -kInfinity;
}

// Adds the log-probability logit - best - log_sum.
PT_HOST_DEVICE float child_score(float parent, float logit, double best, double log_sum) {
  return parent + min_of(static_cast<float>(logit - best - log_sum), 0.0f);
}

PT_HOST_DEVICE void copy_candidate(const ExpandTreeParams& p, int64_t b, int64_t c) {
  const int64_t from = b * p.num_candidates + c;
  const int64_t to = first_child_of(p, b, 0) - p.num_candidates + c;
  p.out_tokens[to] = p.tokens[from];
  p.out_parents[to] = p.parents[from];
  p.out_scores[to] = p.scores[from];
  p.out_kv_index[to] = p.kv_index[from];
}

PT_HOST_DEVICE void enter_frontier(const ExpandTreeParams& p, int64_t b, int32_t f) {
  if (!is_present(frontier_score(p, b, f))) return;
  const int64_t candidates = first_child_of(p, b, 0) - p.num_candidates;
  p.out_kv_index[candidates + p.frontier[b * p.num_expanded + f]] = p.num_kv - p.num_expanded + f;
}

// Links new candidate i, child i % K of frontier node i / K.
PT_HOST_DEVICE void link_child(const ExpandTreeParams& p, int64_t b, int32_t i) {
  const int64_t child = first_child_of(p, b, 0) + i;
  p.out_parents[child] = p.frontier[b * p.num_expanded + i / p.num_children];
  p.out_kv_index[child] = -1;
}

// Returns fixed places, first ranks first: a choice by tokens or scores would bias the verification.
PT_HOST_DEVICE int32_t drawn_frontier(const ExpandTreeParams& p, int32_t g) {
  return static_cast<int32_t>(p.num_candidates) + (g % p.num_expanded) * p.num_children + g / p.num_expanded;
}

// Chooses the nodes to feed next: under "topk" the best new candidates, present ones first.
PT_HOST_DEVICE void choose_frontier(const ExpandTreeParams& p, int64_t b) {
  const int64_t children = first_child_of(p, b, 0);
  const int64_t begin = b * p.num_frontier;
  int32_t* frontier = p.out_frontier + begin;
  const int32_t first = static_cast<int32_t>(p.num_candidates);
  if (p.law == GrowthLaw::kTopK) {
    const int32_t count = p.num_expanded * p.num_children;
    int32_t size = 0;
    for (int32_t c = 0; c < count; ++c) {
      const float score = p.out_scores[children + c];
      size = insert_ranked(p.frontier_scores + begin, frontier, size, p.num_frontier, score, first + c);
    }
  } else {
    for (int32_t g = 0; g < p.num_frontier; ++g) frontier[g] = drawn_frontier(p, g);
  }
}

// Makes a node see its parent's visible nodes and itself; an absent one sees nothing.
PT_HOST_DEVICE void mask_frontier(const ExpandTreeParams& p, int64_t b, int32_t g) {
  const int64_t row = b * p.num_frontier + g;
  const int32_t child = p.out_frontier[row] - static_cast<int32_t>(p.num_candidates);
  const bool present = is_present(p.out_scores[first_child_of(p, b, 0) + child]);
  const int64_t parent_row = b * p.num_expanded + child / p.num_children;
  for (int32_t w = 0; w < p.mask_words; ++w) {
    p.out_mask[row * p.mask_words + w] = present ? p.mask[parent_row * p.mask_words + w] : 0;
  }
  const int32_t bit = p.num_kv + g;
  if (!present || bit >= p.mask_words * kMaskWordBits) return;
  int32_t& word = p.out_mask[row * p.mask_words + bit / kMaskWordBits];
  word = static_cast<int32_t>(static_cast<uint32_t>(word) | (1u << (bit % kMaskWordBits)));
}

// Requires the children's tokens and scores.
PT_HOST_DEVICE void grow_tree(const ExpandTreeParams& p, int64_t b) {
  for (int64_t c = 0; c < p.num_candidates; ++c) copy_candidate(p, b, c);
  for (int32_t f = 0; f < p.num_expanded; ++f) enter_frontier(p, b, f);
  for (int32_t i = 0; i < p.num_expanded * p.num_children; ++i) link_child(p, b, i);
  choose_frontier(p, b);
  for (int32_t g = 0; g < p.num_frontier; ++g) mask_frontier(p, b, g);
}

// Returns the end of the eligible candidates; 0 without a root.
PT_HOST_DEVICE int64_t eligible_end(const RerankTreeParams& p, int64_t b) {
  if ((p.active != nullptr && !p.active[b]) || p.num_candidates == 0) return 0;
  if (!is_present(p.scores[b * p.num_candidates])) return 0;
  return p.by_score ? p.num_candidates : min_of<int64_t>(p.num_candidates, p.num_nodes);
}

PT_HOST_DEVICE int32_t count_reranked(const RerankTreeParams& p, int64_t b) {
  const int64_t end = eligible_end(p, b);
  int64_t count = 0;
  for (int64_t c = 0; c < end; ++c) count += is_present(p.scores[b * p.num_candidates + c]);
  return static_cast<int32_t>(min_of<int64_t>(count, p.num_nodes));
}

// Requires node_of of the candidates before c.
PT_HOST_DEVICE void write_reranked(const RerankTreeParams& p, int64_t b, int32_t c, int32_t node) {
  const int64_t from = b * p.num_candidates, to = p.cu_nodes[b] + node;
  const int32_t parent = p.parents[from + c];
  p.draft_tokens[to] = p.tokens[from + c];
  p.out_parents[to] = parent >= 0 && parent < c ? p.node_of[from + parent] : -1;
  p.node_map[to] = p.kv_index[from + c];
}

// Writes nodes in candidate order, parents first. Scores never rise along a path and parents have smaller indices, so
// the ancestors of a chosen node are chosen too.
PT_HOST_DEVICE void rerank_sequence(const RerankTreeParams& p, int64_t b) {
  const int64_t from = b * p.num_candidates;
  const int32_t count = p.cu_nodes[b + 1] - p.cu_nodes[b];
  if (count == 0) return;
  float* best_scores = p.best_scores + b * p.num_nodes;
  int32_t* best = p.best + b * p.num_nodes;
  int32_t* node_of = p.node_of + from;
  int32_t size = 0;
  for (int32_t c = 0; c < p.num_candidates; ++c) {
    node_of[c] = -1;
    const float score = p.scores[from + c];
    if (p.by_score) {
      if (is_present(score)) size = insert_ranked(best_scores, best, size, count, score, c);
    } else if (is_present(score) && size < count) {
      best[size++] = c;
    }
  }
  for (int32_t i = 0; i < size; ++i) node_of[best[i]] = 0;
  int32_t node = 0;
  for (int32_t c = 0; c < p.num_candidates; ++c) {
    if (node_of[c] < 0) continue;
    write_reranked(p, b, c, node);
    node_of[c] = node++;
  }
}

PT_HOST_DEVICE LogitRow head_row(const MedusaProposeParams& p, int64_t b, int64_t head) {
  LogitRow row = logit_row(p.head_logits, b);
  row.logits = static_cast<const char*>(row.logits) + head * p.head_stride * (row.dtype == DType::kFloat32 ? 4 : 2);
  return row;
}

// Returns -1 if the head has no such token.
PT_HOST_DEVICE int64_t medusa_token(const MedusaProposeParams& p, int64_t b, int32_t node) {
  if (node == 0) return p.root_tokens != nullptr ? p.root_tokens[b] : -1;
  const int32_t head = p.depths[node] - 1, rank = p.child_ranks[node];
  if (head < 0 || head >= p.num_heads || rank < 0 || rank >= p.num_top) return -1;
  return p.top_tokens[(b * p.num_heads + head) * p.num_top + rank];
}

}  // namespace pagedtree
