// Walk along the accepted path of a draft tree, root first. It reads only rows on the path.
// node = root; loop: emit(token(node)); node = child with that token, until there is none
#pragma once

#include "core/tree.h"

namespace pagedtree {

struct VerifyParams {
  LogitsParams logits;          // N rows
  SamplingParams sampling;      // of B
  OptionsParams options;        // of B
  Integers draft_tokens;        // [N]
  Integers draft_to_target;     // [draft_vocab], data null: drafts are target ids already
  const int32_t* cu_nodes;      // [B + 1]
  const int32_t* depths;        // [N]
  const int32_t* first_child;   // [N]
  const int32_t* next_sibling;  // [N]
  const uint8_t* valid;         // [B]
  const int64_t* seeds;         // [B], null where sampling is greedy
  Integers positions;           // [B], data null where sampling is greedy
  const int32_t* tokens_left;   // [B] limit of emitted tokens, or null
  int32_t* accept_index;        // [B, max_depth + 1] out
  int32_t* num_accepted;        // [B] out
  int64_t* tokens;              // [B, max_depth + 1] out
  int32_t* status;              // [B] out
  int64_t batch;
  int64_t draft_vocab;
  int32_t max_nodes;
  int32_t max_depth;
};

// The target's sampled tokens in place of logits.
struct VerifyTokensParams {
  VerifyParams verify;
  Integers target_tokens;  // [N]
};

// Bits of Verdict.status.
constexpr int32_t kMalformedTree = 1;
constexpr int32_t kBadRow = 2;

// Returns the draft's target id, negative if none.
PT_HOST_DEVICE int64_t draft_id_at(const Integers& tokens, const Integers& to_target, int64_t draft_vocab,
                                   int64_t row) {
  const int64_t token = integer_at(tokens, row);
  if (to_target.data == nullptr) return token;
  return token >= 0 && token < draft_vocab ? integer_at(to_target, token) : -1;
}
// Returns -1 outside the target's vocabulary.
PT_HOST_DEVICE int32_t draft_token_at(const Integers& tokens, const Integers& to_target, int64_t draft_vocab,
                                      int64_t vocab, int64_t row) {
  const int64_t token = draft_id_at(tokens, to_target, draft_vocab, row);
  return token >= 0 && token < vocab ? static_cast<int32_t>(token) : -1;
}
PT_HOST_DEVICE int32_t draft_token_at(const VerifyParams& p, int64_t row) {
  return draft_token_at(p.draft_tokens, p.draft_to_target, p.draft_vocab, p.logits.vocab, row);
}

// Copy of a tree's links and tokens in faster memory.
struct NearTree {
  int32_t first_child[kMaxTreeNodes], next_sibling[kMaxTreeNodes];
  int32_t tokens[kMaxTreeNodes];  // target ids
};

// Follows only links to larger indices below `num_nodes`; any other link ends its list and marks the tree malformed.
struct TreeWalk {
  const VerifyParams& p;
  int64_t b;
  NodeRange rows;
  int32_t num_nodes;
  int32_t node = 0;
  int32_t depth = 0;
  int32_t status = 0;
  const NearTree* near = nullptr;

  PT_HOST_DEVICE TreeWalk(const VerifyParams& params, int64_t sequence)
      : p(params), b(sequence), rows(node_range(params.cu_nodes, params.batch, sequence, params.logits.num_rows)) {
    num_nodes = static_cast<int32_t>(min_of<int64_t>(rows.size(), p.max_nodes));
    if (!p.valid[b] || num_nodes == 0) status = kMalformedTree;
  }

  PT_HOST_DEVICE void write(int32_t j, int32_t index, int64_t token) const {
    const int64_t at = b * (p.max_depth + 1) + j;
    p.accept_index[at] = index;
    p.tokens[at] = token;
  }

  PT_HOST_DEVICE int64_t row() const { return rows.begin + node; }

  PT_HOST_DEVICE int32_t follow(int32_t link, int32_t from) {
    if (link < 0) return -1;
    if (link > from && link < num_nodes) return link;
    status |= kMalformedTree;
    return -1;
  }
  PT_HOST_DEVICE int32_t first_child() {
    return follow(near != nullptr ? near->first_child[node] : p.first_child[row()], node);
  }
  PT_HOST_DEVICE int32_t next_sibling(int32_t child) {
    return follow(near != nullptr ? near->next_sibling[child] : p.next_sibling[rows.begin + child], child);
  }
  PT_HOST_DEVICE int32_t token_of(int32_t child) const {
    return near != nullptr ? near->tokens[child] : draft_token_at(p, rows.begin + child);
  }

  // Returns the first in index order, -1 if none.
  PT_HOST_DEVICE int32_t child_with(int32_t token) {
    int32_t child = first_child();
    while (child >= 0 && token_of(child) != token) child = next_sibling(child);
    return child;
  }

  PT_HOST_DEVICE void emit(int64_t token) const { write(depth, node, token); }

  // Returns false, and stays, without a child or at full length.
  PT_HOST_DEVICE bool descend(int32_t child) {
    if (child < 0) return false;
    if (depth == p.max_depth) {
      status |= kMalformedTree;
      return false;
    }
    node = child;
    ++depth;
    return true;
  }

  // Ends the walk, which emitted one token per depth. Cuts the path at the sequence's limit.
  PT_HOST_DEVICE void finish() const {
    const int32_t emitted = num_nodes > 0 ? depth + 1 : 0;
    const int32_t kept = p.tokens_left == nullptr ? emitted : clamp_to(p.tokens_left[b], 0, emitted);
    PT_NO_UNROLL
    for (int32_t j = kept; j <= p.max_depth; ++j) write(j, -1, -1);
    p.num_accepted[b] = max_of(kept - 1, 0);
    p.status[b] = status;
  }
};

template <typename TokenOf, typename DraftOf>
PT_HOST_DEVICE void walk_tokens(TreeWalk& walk, const TokenOf& token_of, const DraftOf& draft_of) {
  for (bool more = walk.num_nodes > 0; more;) {
    const int64_t token = token_of(walk.node);
    if (token < 0) walk.status |= kBadRow;
    walk.emit(max_of<int64_t>(token, -1));
    int32_t child = token < 0 ? -1 : walk.first_child();
    while (child >= 0 && draft_of(child) != token) child = walk.next_sibling(child);
    more = walk.descend(child);
  }
  walk.finish();
}

}  // namespace pagedtree
