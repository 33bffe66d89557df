// What the torch layer hands to a backend: plain structs, a [shape] on every pointer.
// B sequences, N tree nodes (rows) in the batch, T query tokens, V vocabulary.
#pragma once

#include "core/common.h"

namespace pagedtree {

struct BuildTreesParams {
  const int32_t* parents;   // [N] local index in the tree, -1 at the root
  const int32_t* cu_nodes;  // [B + 1]
  int32_t* depths;          // [N] out
  int32_t* first_child;     // [N] out
  int32_t* next_sibling;    // [N] out
  int32_t* mask;            // [N, mask_words] out, contiguous
  bool* valid;              // [B] out
  int64_t batch;
  int64_t num_rows;  // N, padding rows included
  int32_t max_nodes;
  int32_t max_depth;
  int32_t mask_words;
};

// The fields of a batch of trees of R rows, written.
struct TreeOutput {
  int32_t* cu_nodes;      // [B + 1]
  int32_t* parents;       // [R]
  int32_t* depths;        // [R]
  int32_t* first_child;   // [R]
  int32_t* next_sibling;  // [R]
  int32_t* mask;          // [R, mask_words]
  bool* valid;            // [B]
  int32_t mask_words;
};

// Rows of logits, read in their own dtype, and what a grammar allows in them.
struct LogitsParams {
  const void* data;              // [rows, V]
  const uint8_t* allowed;        // [rows, V] or null
  const int32_t* allowed_words;  // [rows, ceil(V / 32)] or null: bit x % 32 of word x / 32 = token x is allowed
  int64_t num_rows;
  int64_t vocab;           // V
  int64_t row_stride;      // in elements
  int64_t allowed_stride;  // in elements of whichever of the two
  DType dtype;
};

// Sampling parameters; each pointer is [1] or [B], its stride 0 or 1.
struct SamplingParams {
  const float* temperature;  // null: greedy
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  int32_t temperature_stride;
  int32_t top_k_stride;
  int32_t top_p_stride;
  int32_t min_p_stride;
  bool joint;  // filter_order "joint"
};

// Token ids, int32 or int64.
struct TokenIds {
  const void* data;
  bool is_int64;
};

// What requests forbid, favour and have said so far (core/options.h tells what becomes of a row). Every pointer may be
// null: the option is not used. Strides count elements.
struct OptionsParams {
  const float* repetition;  // the penalties are [1] or [B], their strides 0 or 1
  const float* presence;
  const float* frequency;
  const int32_t* prompt_mask;    // [B, ceil(V / 32)] packed
  const int32_t* output_counts;  // [B, V]
  const int32_t* allowed_mask;   // [B, ceil(V / 32)] packed
  const int32_t* bias_tokens;    // [num_bias]
  const float* bias_values;      // [num_bias]
  const int32_t* cu_bias;        // [B + 1]
  const int32_t* bad_tokens;     // [num_bad_tokens]
  const int32_t* cu_bad_words;   // [num_bad_words + 1]
  const int32_t* cu_bad_seqs;    // [B + 1]
  const int64_t* history;        // [B, history_width]
  const int32_t* history_lens;   // [B]
  const int32_t* history_start;  // [B]
  const int32_t* stop_ids;       // [B, num_stops], -1: none
  const int64_t* min_position;   // [B]
  const int64_t* positions;      // [B] of the rows or of the roots
  const int32_t* cu_nodes;       // [B + 1] trees, these and the following; null: row n is sequence n
  const int32_t* parents;        // [num_rows]
  const int32_t* depths;         // [num_rows]
  TokenIds draft_tokens;         // [num_rows]
  TokenIds draft_to_target;      // [draft_vocab], data null: drafts are target ids already
  float* scratch;                // [scratch_rows, scratch_stride] for backends that cannot allocate
  int64_t batch, num_rows, draft_vocab;
  int64_t vocab;        // V, of all ranks
  int64_t first_token;  // of the columns that this rank has
  int64_t num_bias, num_bad_tokens, num_bad_words, num_stops;
  int64_t history_width;
  int64_t prompt_stride, counts_stride, allowed_stride, history_stride, stops_stride;
  int64_t scratch_rows, scratch_stride;
  int32_t repetition_stride, presence_stride, frequency_stride;
  bool used;  // whether there is any option
};

struct SampleParams {
  LogitsParams logits;       // R rows
  SamplingParams sampling;   // of R
  OptionsParams options;     // of R
  const int64_t* seeds;      // [R]
  const int64_t* positions;  // [R]
  int64_t* tokens;           // [R] out
};

// How likely tokens are, of R rows in a batch of logits.
struct TokenLogprobsParams {
  LogitsParams logits;      // N rows
  SamplingParams sampling;  // of R; temperature null: the logits' own softmax
  OptionsParams options;    // of R
  TokenIds tokens;          // [R]
  TokenIds rows;            // [R] the row of logits, data null: row r
  float* logprobs;          // [R] out
  int64_t* ranks;           // [R] out
  int64_t* top_tokens;      // [R, top_n] out
  float* top_logprobs;      // [R, top_n] out
  int64_t num_tokens;       // R
  int32_t top_n;
};

// A row's token, drawn in advance for sequence `sequence` at `depth`.
struct DrawnRow {
  int32_t token;
  int32_t sequence;  // -1: not drawn
  int32_t depth;
  bool bad;
};

// Trees with drafts, and the rows of logits at their nodes.
struct VerifyParams {
  LogitsParams logits;          // N rows
  SamplingParams sampling;      // of B
  OptionsParams options;        // of B
  TokenIds draft_tokens;        // [N]
  TokenIds draft_to_target;     // [draft_vocab], data null: drafts are target ids already
  const int32_t* cu_nodes;      // [B + 1]
  const int32_t* depths;        // [N]
  const int32_t* first_child;   // [N]
  const int32_t* next_sibling;  // [N]
  const uint8_t* valid;         // [B]
  const int64_t* seeds;         // [B], null where sampling is greedy
  const int64_t* positions;     // [B], null where sampling is greedy
  int32_t* accept_index;        // [B, max_depth + 1] out
  int32_t* num_accepted;        // [B] out
  int64_t* tokens;              // [B, max_depth + 1] out
  int32_t* status;              // [B] out
  DrawnRow* drawn_rows;         // [N] scratch
  int64_t batch;
  int64_t draft_vocab;
  int32_t max_nodes;
  int32_t max_depth;
};

// How a node's children were chosen: drawn independently, drawn without replacement, or not drawn at all.
enum class DraftLaw : int32_t { kIid, kSwor, kOneHot };

struct TraversalFrame;  // core/verify/traversal.h

// Verification that weighs the target's distribution against the draft's.
struct RatioParams {
  VerifyParams verify;
  LogitsParams draft;             // [M, V] the distributions that children were drawn from; data null under kOneHot
  SamplingParams draft_sampling;  // of B; temperature null: `draft` holds probabilities, else logits
  TokenIds draft_rows;            // [N] the row of `draft` for a node's children, data null: row n
  const float* coins;             // [N] or null
  const float* final_coins;       // [B] or null
  TraversalFrame* frames;         // [B, max_depth + 1] scratch, verify_traversal's
  DraftLaw law;
  float epsilon, delta;  // verify_typical's
};

enum class GrowthLaw : int32_t { kTopK, kIid, kSwor, kCoupled };

// Adds a level: B sequences of C candidates, F of them the frontier; K children for each, then a frontier of G.
struct ExpandTreeParams {
  const int64_t* tokens;     // [B, C]
  const int32_t* parents;    // [B, C] candidate, -1 at the root
  const float* scores;       // [B, C] cumulative log-probability, -inf = absent
  const int32_t* kv_index;   // [B, C] index in the draft model's tree, -1 = not fed
  const int32_t* frontier;   // [B, F] candidates
  const int32_t* mask;       // [B * F, mask_words] what they see in the draft model's tree
  LogitsParams logits;       // B * F rows
  SamplingParams sampling;   // of B; null under kTopK, like the next two
  const int64_t* seeds;      // [B]
  const int64_t* positions;  // [B], the roots'
  int64_t* out_tokens;       // [B, C + F * K] out
  int32_t* out_parents;      // [B, C + F * K] out
  float* out_scores;         // [B, C + F * K] out
  int32_t* out_kv_index;     // [B, C + F * K] out
  int32_t* out_frontier;     // [B, G] out
  int32_t* out_mask;         // [B * G, mask_words] out
  float* draft_probs;        // [B * F, V] out, not under kTopK
  float* frontier_scores;    // [B, G] scratch
  int64_t batch;
  int64_t num_candidates;  // C
  GrowthLaw law;
  int32_t level;         // depth of the frontier
  int32_t num_expanded;  // F
  int32_t num_children;  // K
  int32_t num_frontier;  // G
  int32_t num_kv;        // nodes in the draft model's tree, the F of the frontier included
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

struct NgramProposeParams {
  const int64_t* history;       // [B, history_width], row stride history_stride
  const int32_t* history_lens;  // [B]
  const int64_t* extra;         // [B, extra_width], row stride extra_stride; or null
  const uint8_t* active;        // [B] or null
  int64_t* draft_tokens;        // [B * max_nodes] out
  int32_t* parents;             // [B * max_nodes] out
  int32_t* cu_nodes;            // [B + 1] out
  int64_t* trie_tokens;         // [B, max_nodes] scratch
  int32_t* trie_links;          // [B, 4, max_nodes] scratch
  int32_t* trie_sizes;          // [B] scratch
  int32_t* next_places;         // [B, history_width + extra_width] scratch
  int64_t batch;
  int64_t history_width, history_stride;
  int64_t extra_width, extra_stride;
  int32_t max_nodes;
  int32_t max_depth;
  int32_t min_ngram, max_ngram;
  int32_t max_branches;
};

struct MedusaProposeParams {
  LogitsParams head_logits;    // B rows of head 0; head h begins h * head_stride elements later
  const int32_t* parents;      // [n] one tree for all
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

struct BestFirstTreeParams {
  const float* log_probs;      // [B, H, K], the last dimension contiguous
  const int64_t* tokens;       // [B, H, K], the last dimension contiguous
  const int64_t* root_tokens;  // [B]
  int64_t* draft_tokens;       // [B * num_nodes] out
  float* joints;               // [B * num_nodes] out, log-probabilities of the nodes' paths
  TreeOutput trees;            // B * num_nodes rows out
  int64_t batch;
  int64_t log_probs_stride, log_probs_level_stride;
  int64_t tokens_stride, tokens_level_stride;
  int32_t num_levels;      // H
  int32_t num_candidates;  // K
  int32_t num_nodes;       // at most kMaxTreeNodes
};

struct SelectNodesParams {
  const int32_t* cu_nodes;  // [B + 1]
  const int32_t* parents;   // [N]
  const int32_t* depths;    // [N]
  const uint8_t* valid;     // [B]
  const float* survival;    // [N]
  const int32_t* limit;     // [1] or null: budget
  TreeOutput trees;         // capacity rows out
  int32_t* node_map;        // [capacity] out
  uint32_t* keys;           // [N] scratch
  int64_t batch;
  int64_t num_rows;  // N
  int64_t capacity;  // max(budget, B)
  int64_t budget;
  int32_t max_nodes;
  int32_t max_depth;
};

// Row b names the pages of sequence b, in the order of its positions.
struct PageTable {
  const int32_t* pages;  // [B, max_pages], row stride row_stride
  int64_t row_stride;
  int64_t max_pages;
  int64_t page_size;
};

struct SlotMappingParams {
  PageTable table;
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  int64_t* slots;               // [T] out
  int64_t batch;
  int64_t total_q;  // T
};

// K or V: where the new rows are and where they go. Strides count elements.
struct AppendSide {
  const void* rows;    // [T, num_kv_heads, head_dim], last dimension contiguous
  void* cache;         // [num_pages, page_size, num_kv_heads, head_dim], last dimension contiguous, written
  const float* scale;  // [1], or [num_kv_heads] with scale_stride 1; null = 1
  int64_t token_stride, head_stride;
  int64_t cache_page_stride, cache_slot_stride, cache_head_stride;
  int64_t scale_stride;
  int64_t head_dim;  // V's may be another one than K's
};

struct AppendKvParams {
  AppendSide sides[2];   // K, V
  int32_t num_sides;     // 1: K alone, as in the latent cache of MLA
  const int64_t* slots;  // [T]
  int64_t num_tokens;    // T
  int64_t num_kv_heads;
  int64_t num_pages, page_size;
  DType dtype;
  DType cache_dtype;  // dtype: rows are copied; else kFloat8E4M3
};

// One tensor of [num_pages, page_size, ...] as bytes: a row is sizes[0] * sizes[1] * sizes[2] runs of run_bytes.
struct CacheView {
  void* data;
  int64_t page_stride, slot_stride;  // bytes
  int64_t run_bytes;
  int64_t sizes[3];
  int64_t strides[3];  // bytes
};

constexpr int kMaxCompactTensors = 128;

// Small enough to travel as the argument of one launch.
struct CompactKvParams {
  CacheView caches[kMaxCompactTensors];
  PageTable table;
  const int32_t* start;         // [B]
  const int32_t* accept_index;  // [B, path_width], row stride accept_stride
  const int32_t* num_accepted;  // [B]
  int32_t* seq_lens;            // [B] out
  int64_t batch;
  int64_t accept_stride;
  int64_t num_pages;
  int32_t num_caches;
  int32_t path_width;  // S, at most kMaxTreeNodes
};

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
  int64_t num_rows;  // rows that may belong to a sequence: min(N, T)
  int64_t total_q;   // T
};

struct CommitParams {
  const int32_t* accept_index;  // [B, S], row stride accept_stride
  const int32_t* num_accepted;  // [B]
  const int64_t* tokens;        // [B, S], row stride tokens_stride
  const int32_t* cu_nodes;      // [B + 1]
  const int32_t* start;         // [B]
  const int64_t* eos_ids;       // [num_eos], or [B, num_eos] with row stride eos_stride
  const int32_t* node_map;      // [num_rows]
  int64_t* history;             // [B, history_width], row stride history_stride, written
  int32_t* history_lens;        // [B] written; null without history
  int32_t* output_counts;       // [B, counts_width], row stride counts_stride, written; or null
  int32_t* new_start;           // [B] out
  int64_t* last_token;          // [B] out
  bool* finished;               // [B] out
  int32_t* out_num_accepted;    // [B] out
  int32_t* num_tokens;          // [B] out
  int64_t* accept_rows;         // [B, S] out
  int32_t* draft_num_accepted;  // [B] out; null without node_map
  int32_t* draft_accept_index;  // [B, S] out
  int64_t* draft_missing;       // [B, S] out
  int32_t* draft_num_missing;   // [B] out
  int64_t batch;
  int64_t num_rows;
  int64_t accept_stride, tokens_stride, eos_stride;
  int64_t num_eos;
  int64_t history_width, history_stride;
  int64_t counts_width, counts_stride;
  int32_t path_width;  // S
};

// One cache of a layer, [pages, page_size, Hkv, D]; strides in elements, the last dimension is contiguous.
struct PagedCache {
  const void* data;
  int64_t page_stride;
  int64_t slot_stride;
  int64_t head_stride;
};

// Which instructions multiply on a GPU. wgmma is Hopper's, for the tiles in cuda/attention/config.h that have it; all
// others use mma.sync.
enum class MatrixEngine : int32_t { kMmaSync, kWgmma };

// Sizes B sequences, T query tokens (padding included), Hq = Hkv * group_size heads, D head_dim, Dv head_dim_v, W
// mask_words.
struct TreeAttentionParams {
  const void* q;       // [T, Hq, D]
  PagedCache k_cache;  // [pages, page_size, Hkv, D]
  PagedCache v_cache;  // [pages, page_size, Hkv, Dv]
  PageTable table;
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* tree_mask;     // [T, W] or null: causal
  const int32_t* tree_lens;     // [B] or null: the query lengths
  const float* sinks;           // [Hq] or null
  const float* k_scale;         // [Hkv], [1] with k_scale_stride 0, or null: 1
  const float* v_scale;         // likewise
  const int32_t* plan;          // [kPlanSize], see schedule.h
  void* out;                    // [T, Hq, Dv]
  float* lse;                   // [T, Hq] or null
  void* scratch;                // Backend::tree_attention_scratch() bytes
  int64_t q_token_stride, q_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride, lse_head_stride;
  int64_t mask_stride;
  int64_t k_scale_stride, v_scale_stride;
  int64_t batch;
  int64_t num_tokens;
  int64_t num_pages;
  int64_t window;        // 0: none
  int64_t max_seqlen_q;  // a hint
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t mask_words;
  DType q_dtype;  // of q and out
  DType kv_dtype;
  float scale;
  float softcap;  // 0: none
  MatrixEngine engine;
  bool latent;  // one KV head, whose V is the first Dv columns of K
};

struct AttentionPlanParams {
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  int32_t* plan;                // [kPlanSize] out
  int64_t batch;
  int64_t num_tokens;  // bound on T
  int64_t max_seq_len;
  int64_t max_seqlen_q;  // a hint
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t head_dim;
  int32_t head_dim_v;
  MatrixEngine engine;  // of the calls
  bool latent;
};

struct MergeStatesParams {
  const void* out_a;   // [T, H, D]
  const void* out_b;   // [T, H, D]
  const float* lse_a;  // [T, H]
  const float* lse_b;  // [T, H]
  void* out;           // [T, H, D] out, contiguous
  float* lse;          // [T, H] out, contiguous
  int64_t a_token_stride, a_head_stride;
  int64_t b_token_stride, b_head_stride;
  int64_t lse_a_token_stride, lse_a_head_stride;
  int64_t lse_b_token_stride, lse_b_head_stride;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  DType dtype;
};

}  // namespace pagedtree
