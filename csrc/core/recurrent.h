// Layers with a recurrent state: gated delta rule, Mamba-2, short convolutions.
// state(node) = update(state(parent(node)), token(node)); the root continues the stored state
#pragma once

#include "core/math.h"
#include "core/tree.h"

namespace pagedtree {

constexpr int kMaxRecurrentNodes = 256;  // of a tree
constexpr int kMaxRecurrentDim = 256;    // of keys and values
constexpr int kMaxConvWidth = 16;
constexpr int kCausalChunk = 64;  // tokens processed together

// Without `parents` each row follows the one before it.
struct RecurrentBatch {
  const int32_t* cu_nodes;      // [B + 1]
  const int32_t* parents;       // [num_rows] or null: causal
  const int32_t* depths;        // [num_rows], with parents
  const int32_t* accept_index;  // [B, S]; with parents, if states advance
  const int32_t* num_accepted;  // [B] likewise
  const int32_t* state_index;   // [B]
  int64_t num_slots;
  int64_t batch;
  int64_t num_rows;  // T
  int64_t accept_stride;
  int32_t path_width;  // S
  int32_t max_nodes;   // per tree; 0 without parents
};

// For tree_delta_rule, and advance_state, which lacks q and out and writes `state`.
struct DeltaRuleParams {
  RecurrentBatch tokens;
  const void* q;      // [T, Hk, Dk], only for `out`
  const void* k;      // [T, Hk, Dk]
  const void* v;      // [T, H, Dv]
  const float* g;     // [T, H] or [T, H, Dk]
  const float* beta;  // [T, H] or null: no delta
  float* state;       // [num_slots, H, Dk, Dv]
  void* out;          // [T, H, Dv] out, contiguous; or null
  float* decays;      // [T, H, Dk] scratch with channel_decay, for backends that cannot allocate
  int64_t q_token_stride, q_head_stride;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  int64_t g_token_stride, g_head_stride;
  int64_t beta_token_stride, beta_head_stride;
  int64_t state_strides[4];
  int32_t num_heads;   // H
  int32_t group_size;  // H / Hk
  int32_t key_dim;     // Dk
  int32_t value_dim;   // Dv
  bool channel_decay;  // g is [T, H, Dk]
  bool l2norm;
  float l2norm_eps;
  float scale;
  DType dtype;  // of q, k, v, out
};

// For tree_conv1d, and advance_conv, which lacks weight and out and writes `conv_state`.
struct ConvParams {
  RecurrentBatch tokens;
  const void* x;       // [T, C]
  const void* weight;  // [C, W] or null
  const void* bias;    // [C] or null
  void* conv_state;    // [num_slots, C, W - 1]
  void* out;           // [T, C] out, contiguous; or null
  int64_t x_stride;
  int64_t weight_strides[2];
  int64_t bias_stride;
  int64_t state_strides[3];
  int64_t channels;    // C
  int32_t width;       // W
  DType dtype;         // of x, conv_state, out
  DType weight_dtype;  // of weight and bias
  bool silu;
};

// Returns -1 without a state.
PT_HOST_DEVICE int64_t state_index_of(const RecurrentBatch& p, int64_t b) {
  const int64_t index = p.state_index[b];
  return index >= 0 && index < p.num_slots ? index : -1;
}

// Returns exp(g) in 0..1; positive g and NaN read as 0.
template <typename M>
PT_HOST_DEVICE typename M::Float decay_of(typename M::Float g) {
  const auto zero = M::splat(0.0f), logarithm = M::select(g < zero, g, zero);
  return M::select(logarithm < M::splat(-87.0f), zero, exp_exact<M>(logarithm));
}

// Returns the node's parent in its tree: -1 for the root, -2 if unlinked.
PT_HOST_DEVICE int32_t linked_parent(const RecurrentBatch& p, int64_t begin, int64_t node) {
  if (node >= p.max_nodes) return -2;
  if (node == 0) return -1;
  const int32_t parent = p.parents[begin + node], depth = p.depths[begin + node];
  return parent >= 0 && parent < node && depth >= 0 ? parent : -2;
}

// Lists reachable nodes in order: `nodes` are tree indices, `parents` indices in this list, -1 for the root. All arrays
// have max_nodes entries. Returns the number.
PT_HOST_DEVICE int32_t reachable_nodes(const RecurrentBatch& p, int64_t b, int32_t* nodes, int32_t* parents,
                                       int32_t* place) {
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  const int32_t size = static_cast<int32_t>(min_of<int64_t>(rows.size(), p.max_nodes));
  int32_t count = 0;
  for (int32_t node = 0; node < size; ++node) {
    const int32_t parent = linked_parent(p, rows.begin, node);
    place[node] = -1;
    if (parent < -1 || (parent >= 0 && place[parent] < 0)) continue;
    parents[count] = parent < 0 ? -1 : place[parent];
    nodes[count] = node;
    place[node] = count++;
  }
  return count;
}

// Returns the number of tokens that the state absorbs; 0 without a state or a path.
PT_HOST_DEVICE int64_t tokens_to_replay(const RecurrentBatch& p, int64_t b) {
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  if (state_index_of(p, b) < 0) return 0;
  if (p.accept_index == nullptr) return rows.size();
  const int32_t* path = p.accept_index + b * p.accept_stride;
  const int32_t accepted = p.num_accepted[b];
  if (accepted < 0 || accepted >= p.path_width) return 0;
  for (int32_t j = 0; j <= accepted; ++j) {
    const int32_t node = path[j];
    if (node < 0 || node >= rows.size() || linked_parent(p, rows.begin, node) != (j == 0 ? -1 : path[j - 1])) return 0;
  }
  return int64_t{accepted} + 1;
}

PT_HOST_DEVICE int64_t replayed_row(const RecurrentBatch& p, int64_t b, int64_t j) {
  const int64_t begin = node_range(p.cu_nodes, p.batch, b, p.num_rows).begin;
  return begin + (p.accept_index == nullptr ? j : p.accept_index[b * p.accept_stride + j]);
}

}  // namespace pagedtree
