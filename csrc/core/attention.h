// Params of the attention ops, and the keys visible to a query. core/schedule.h cuts the work.
// out = softmax(scale * q K^T over visible keys) V;  lse = log of the sum of exp
#pragma once

#include "core/params.h"

namespace pagedtree {

// Cache of a layer [pages, page_size, Hkv, D]; strides in elements, last dimension contiguous.
struct PagedCache {
  const void* data;
  int64_t page_stride;
  int64_t slot_stride;
  int64_t head_stride;
};

// wgmma needs Hopper and a tile in cuda/attention/config.h; mma.sync serves all others. kAuto: wgmma if its self-test
// passed (cuda/engine.h).
enum class MatrixEngine : int32_t { kMmaSync, kWgmma, kAuto };

// A step's batch, common to its plan and its calls: B sequences, T query tokens with padding, Hq = Hkv * group_size
// heads, D head_dim, Dv head_dim_v.
struct AttentionBatch {
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* tree_lens;     // [B] or null: the query lengths; in a plan all queries then count as causal
  int32_t* plan;                // [plan_size(segment)], see schedule.h; written by attention_plan
  int64_t batch;
  int64_t num_tokens;    // T, in a plan a bound
  int64_t window;        // 0: none
  int64_t max_seqlen_q;  // a hint
  int64_t segment;       // keys, a multiple of kKvTile; 0: none
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t head_dim;
  int32_t head_dim_v;
  MatrixEngine engine;  // equal in the plan and its calls
  bool latent;          // one KV head, whose V is the first Dv columns of K
};

struct AttentionPlanParams : AttentionBatch {
  int64_t max_seq_len;
};

// W mask_words.
struct TreeAttentionParams : AttentionBatch {
  const void* q;       // [T, Hq, D]
  PagedCache k_cache;  // [pages, page_size, Hkv, D]
  PagedCache v_cache;  // [pages, page_size, Hkv, Dv]
  PageTable table;
  const int32_t* tree_mask;  // [T, W] or null: causal
  const float* sinks;        // [Hq] or null
  const float* k_scale;      // [Hkv], [1] with k_scale_stride 0, or null: 1
  const float* v_scale;      // likewise
  void* out;                 // [T, Hq, Dv]
  float* lse;                // [T, Hq] or null
  void* scratch;             // Backend::tree_attention_scratch() bytes
  int64_t q_token_stride, q_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride, lse_head_stride;
  int64_t mask_stride;
  int64_t k_scale_stride, v_scale_stride;
  int64_t num_pages;
  int32_t mask_words;
  DType q_dtype;  // of q and out
  DType kv_dtype;
  float scale;
  float softcap;  // 0: none
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

// Bounds are clamped to 0..32.
PT_HOST_DEVICE uint32_t bit_range(int32_t low, int32_t high) {
  low = clamp_to(low, 0, kMaskWordBits);
  high = clamp_to(high, 0, kMaskWordBits);
  if (low >= high) return 0;
  return (~0u >> (kMaskWordBits - (high - low))) << low;
}

// Start of a window in the tree and in the prefix.
struct TreeWindow {
  int32_t begin, first_bit;
};

// Visible keys of a query: positions [begin, end), and tree_start + bit for set bits of `words` in [first_bit,
// num_bits). Causal queries have no tree bits. Positions are below 2^31.
struct Visibility {
  int32_t begin;
  int32_t end;
  int32_t tree_start;
  const int32_t* words;  // [num_words]; missing words are 0
  int32_t num_words;
  int32_t first_bit;
  int32_t num_bits;

  PT_HOST_DEVICE void narrow(const TreeWindow& window) {
    begin = window.begin;
    first_bit = window.first_bit;
  }

  // Bounds the visible keys: none is outside [lowest(), highest()).
  PT_HOST_DEVICE int32_t lowest() const { return begin < end ? begin : tree_start + first_bit; }
  PT_HOST_DEVICE int32_t highest() const { return num_bits > 0 ? tree_start + num_bits : end; }

  PT_HOST_DEVICE uint32_t word(int32_t w) const {
    return w >= 0 && w < num_words ? static_cast<uint32_t>(words[w]) : 0u;
  }

  // Returns bit i for key position + i.
  PT_HOST_DEVICE uint32_t visible32(int32_t position) const {
    const uint32_t prefix = bit_range(begin - position, end - position);
    const int32_t bit = position - tree_start;  // mask bit of the first key, possibly negative
    if (bit >= num_bits || bit <= -kMaskWordBits) return prefix;
    const int32_t w = (bit + kMaskWordBits) / kMaskWordBits - 1;
    const uint64_t pair = (static_cast<uint64_t>(word(w + 1)) << kMaskWordBits) | word(w);
    const uint32_t tree = static_cast<uint32_t>(pair >> (bit - w * kMaskWordBits));
    return prefix | (tree & bit_range(first_bit - bit, num_bits - bit));
  }
};

// Larger windows keep everything; differences with this one do not overflow.
constexpr int64_t kMaxWindow = int64_t{1} << 31;

// Lets query i of the last n positions see keys up to its position.
PT_HOST_DEVICE Visibility causal_visibility(int64_t seq_len, int64_t n, int64_t i, int64_t window) {
  const int32_t end = static_cast<int32_t>(seq_len) + min_of(static_cast<int32_t>(i - n) + 1, 0);
  Visibility seen{};
  seen.end = max_of(end, 0);
  seen.begin = window > 0 && end > window ? end - static_cast<int32_t>(window) : 0;
  seen.tree_start = static_cast<int32_t>(seq_len);
  return seen;
}

// Keeps the highest `window` set bits, since a node's depth is the number of lower set bits; the rest covers the
// prefix's end.
PT_HOST_DEVICE TreeWindow tree_window(const int32_t* words, int32_t num_words, int32_t num_bits, int32_t tree_start,
                                      int64_t window) {
  int32_t first_bit = 0, left = static_cast<int32_t>(min_of(window, kMaxWindow - 1));  // rest of the window
  for (int32_t bit = (num_bits - 1) / kMaskWordBits * kMaskWordBits; bit >= 0 && left > 0; bit -= kMaskWordBits) {
    const int32_t w = bit / kMaskWordBits;
    uint32_t bits = (w < num_words ? static_cast<uint32_t>(words[w]) : 0u) & bit_range(0, num_bits - bit);
    while (popcount32(bits) > left) bits &= bits - 1;  // clears the lowest
    left -= popcount32(bits);
    if (left == 0) first_bit = bit + popcount32(~bits & (bits - 1));
  }
  return {max_of(tree_start - left, 0), first_bit};
}

// Reads the query's mask row `words`, over a tree of the last `tree_len` keys.
PT_HOST_DEVICE Visibility tree_visibility(int64_t seq_len, int64_t tree_len, const int32_t* words, int32_t num_words,
                                          int64_t window) {
  Visibility seen{};
  seen.tree_start = static_cast<int32_t>(seq_len - tree_len);
  seen.end = seen.tree_start;
  seen.words = words;
  seen.num_words = num_words;
  seen.num_bits = static_cast<int32_t>(min_of<int64_t>(tree_len, int64_t{num_words} * kMaskWordBits));
  if (window > 0) seen.narrow(tree_window(words, num_words, seen.num_bits, seen.tree_start, window));
  return seen;
}

// Returns the number of last keys that are the tree's; -1 for causal queries.
PT_HOST_DEVICE int32_t tree_length(const TreeAttentionParams& p, int64_t b, int32_t num_queries, int32_t seq_len) {
  const int32_t length = p.tree_mask == nullptr ? -1 : p.tree_lens != nullptr ? p.tree_lens[b] : num_queries;
  return clamp_to(length, -1, seq_len);
}

}  // namespace pagedtree
