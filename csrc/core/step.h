// Bookkeeping before and after a step's target pass, per sequence.
// prepare: positions = start + depth, slots of the nodes;  commit: keeps the accepted path up to eos or the limit
#pragma once

#include "core/kv_cache.h"
#include "core/tree.h"

namespace pagedtree {

struct PrepareStepParams {
  PageTable table;
  const int32_t* cu_nodes;  // [B + 1]
  const int32_t* depths;    // [num_rows]
  const int32_t* start;     // [B]
  int64_t* positions;       // [T] out
  int32_t* seq_lens;        // [B] out
  int32_t* cu_seqlens_q;    // [B + 1] out
  int64_t* slots;           // [T] out
  int64_t batch;
  int64_t num_rows;  // rows of sequences: min(N, T)
  int64_t total_q;   // T
};

struct CommitParams {
  const int32_t* accept_index;  // [B, S]
  const int32_t* num_accepted;  // [B]
  const int64_t* tokens;        // [B, S]
  const int32_t* cu_nodes;      // [B + 1]
  const int32_t* start;         // [B]
  const int64_t* eos_ids;       // [num_eos] or [B, num_eos]
  const int32_t* node_map;      // [num_rows]
  const int32_t* tokens_left;   // [B] limit of kept tokens, or null
  int64_t* history;             // [num_histories, history_width], written
  int32_t* history_lens;        // [num_histories] written; null without history
  const int32_t* history_rows;  // [B] or null: sequence b has history b
  int32_t* output_counts;       // [B, counts_width], written; or null
  int32_t* new_start;           // [B] out
  int64_t* last_token;          // [B] out
  bool* finished;               // [B] out
  int32_t* out_num_accepted;    // [B] out
  int32_t* num_tokens;          // [B] out
  int64_t* accept_rows;         // [B, S] out
  int32_t* draft_num_accepted;  // [B] out, only with a node_map, like the next three
  int32_t* draft_accept_index;  // [B, S] out
  int64_t* draft_missing;       // [B, S] out
  int32_t* draft_num_missing;   // [B] out
  int64_t batch;
  int64_t num_rows;
  int64_t accept_stride, tokens_stride, eos_stride;
  int64_t num_eos;
  int64_t num_histories, history_width, history_stride;
  int64_t counts_width, counts_stride;
  int32_t path_width;  // S
};

// Treats a sequence with a negative start as idle: its rows are padding.
PT_HOST_DEVICE void prepare_row(const PrepareStepParams& p, int64_t row) {
  p.positions[row] = 0;
  p.slots[row] = -1;
  const int64_t b = row < p.num_rows ? sequence_of_row(p.cu_nodes, p.batch, row) : -1;
  if (b < 0 || p.start[b] < 0) return;
  const int64_t start = p.start[b];
  p.positions[row] = start + max_of(p.depths[row], 0);
  const int64_t node = row - node_range(p.cu_nodes, p.batch, b, p.num_rows).begin;
  p.slots[row] = slot_id(locate(p.table, b, start + node), p.table.page_size);
}

PT_HOST_DEVICE int32_t prepared_length(const PrepareStepParams& p, int64_t b) {
  if (p.start[b] < 0) return 0;
  const int64_t length = p.start[b] + node_range(p.cu_nodes, p.batch, b, p.num_rows).size();
  return static_cast<int32_t>(min_of<int64_t>(length, INT32_MAX));
}

PT_HOST_DEVICE int64_t num_items(const PrepareStepParams& p) { return max_of(p.total_q, p.batch + 1); }

PT_HOST_DEVICE void prepare_item(const PrepareStepParams& p, int64_t i) {
  if (i < p.total_q) prepare_row(p, i);
  if (i < p.batch) p.seq_lens[i] = prepared_length(p, i);
  if (i <= p.batch) p.cu_seqlens_q[i] = static_cast<int32_t>(clamp_to<int64_t>(p.cu_nodes[i], 0, p.num_rows));
}

PT_HOST_DEVICE bool is_eos(const CommitParams& p, int64_t b, int64_t token) {
  for (int64_t e = 0; e < p.num_eos; ++e) {
    if (p.eos_ids[b * p.eos_stride + e] == token) return true;
  }
  return false;
}

// Returns the number of kept tokens, 0 without a tree. `ended`: the last one is an eos or the last that is left. The
// path stops at invalid entries: nodes out of order or range, negative tokens.
PT_HOST_DEVICE int32_t kept_tokens(const CommitParams& p, int64_t b, int64_t num_nodes, bool& ended) {
  ended = false;
  const int32_t* nodes = p.accept_index + b * p.accept_stride;
  const int64_t* tokens = p.tokens + b * p.tokens_stride;
  if (p.path_width < 1 || num_nodes < 1 || p.start[b] < 0 || nodes[0] != 0) return 0;
  const int32_t left = p.tokens_left == nullptr ? INT32_MAX : p.tokens_left[b];
  const int32_t most = min_of(clamp_to(p.num_accepted[b], 0, p.path_width - 1) + 1, left);
  int32_t kept = 0;
  while (!ended && kept < most && tokens[kept] >= 0) {
    if (kept > 0 && (nodes[kept] <= nodes[kept - 1] || nodes[kept] >= num_nodes)) break;
    ended = is_eos(p, b, tokens[kept++]);
  }
  ended = ended || kept == left;
  return kept;
}

PT_HOST_DEVICE void append_history(const CommitParams& p, int64_t b, int32_t count) {
  const int64_t row = row_in_pool(p.history_rows, p.num_histories, b);
  if (row < 0) return;
  const int64_t length = clamp_to<int64_t>(p.history_lens[row], 0, p.history_width);
  const int64_t fitting = min_of<int64_t>(count, p.history_width - length);
  for (int64_t j = 0; j < fitting; ++j) {
    p.history[row * p.history_stride + length + j] = p.tokens[b * p.tokens_stride + j];
  }
  p.history_lens[row] = static_cast<int32_t>(length + fitting);
}

PT_HOST_DEVICE void count_tokens(const CommitParams& p, int64_t b, int32_t count) {
  for (int32_t j = 0; j < count; ++j) {
    const int64_t token = p.tokens[b * p.tokens_stride + j];
    if (token >= p.counts_width) continue;
    int32_t& counted = p.output_counts[b * p.counts_stride + token];
    counted = min_of(counted, INT32_MAX - 1) + 1;
  }
}

// Finds the path's nodes in the draft model's cache, and the tokens that it lacks.
PT_HOST_DEVICE void map_to_draft(const CommitParams& p, int64_t b, int64_t first_row, int32_t kept) {
  const int32_t* nodes = p.accept_index + b * p.accept_stride;
  int32_t* draft_nodes = p.draft_accept_index + b * p.path_width;
  int64_t* missing = p.draft_missing + b * p.path_width;
  int32_t present = 0;
  if (kept > 0) draft_nodes[present++] = 0;
  while (present > 0 && present < kept) {
    const int32_t draft_node = p.node_map[first_row + nodes[present]];
    if (draft_node < 0) break;
    draft_nodes[present++] = draft_node;
  }
  for (int32_t j = present; j < p.path_width; ++j) draft_nodes[j] = -1;
  const int32_t num_missing = kept - present;
  for (int32_t j = 0; j < p.path_width; ++j) {
    missing[j] = j < num_missing ? p.tokens[b * p.tokens_stride + present - 1 + j] : -1;
  }
  p.draft_num_accepted[b] = max_of(present - 1, 0);
  p.draft_num_missing[b] = num_missing;
}

PT_HOST_DEVICE int64_t num_items(const CommitParams& p) { return p.batch; }

PT_HOST_DEVICE void commit_sequence(const CommitParams& p, int64_t b) {
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  bool ended;
  const int32_t kept = kept_tokens(p, b, rows.size(), ended);
  p.new_start[b] = static_cast<int32_t>(min_of<int64_t>(int64_t{p.start[b]} + kept, INT32_MAX));
  p.last_token[b] = kept > 0 ? p.tokens[b * p.tokens_stride + kept - 1] : -1;
  p.finished[b] = kept == 0 || ended;
  p.out_num_accepted[b] = max_of(kept - 1, 0);
  p.num_tokens[b] = kept;
  for (int32_t j = 0; j < p.path_width; ++j) {
    p.accept_rows[b * p.path_width + j] = j < kept ? rows.begin + p.accept_index[b * p.accept_stride + j] : -1;
  }
  if (p.history_lens != nullptr && kept > 0) append_history(p, b, kept);
  if (p.output_counts != nullptr) count_tokens(p, b, kept);
  if (p.node_map != nullptr) map_to_draft(p, b, rows.begin, kept);
}

}  // namespace pagedtree
