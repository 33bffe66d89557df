// Compiled once per instruction set: the gated delta rule over a chunk of tokens, of which each follows its parent. The
// algebra is in docs/notes/recurrent.md.
#include "cpu/isa/tile/gemm.h"
#include "cpu/isa/tile/math.h"
#include "cpu/isa/tile/rows.h"
#include "cpu/recurrent_work.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

static_assert(kDeltaPadding % kPanel == 0);

// One value head of one sequence.
struct Head {
  const DeltaRuleParams& p;
  const DeltaScratch& s;
  int64_t first_row;  // of the sequence, or of the chunk
  int64_t head;
};

const void* element(const void* data, DType dtype, int64_t offset) {
  return static_cast<const char*>(data) + offset * element_size(dtype);
}

struct Dots {
  float key, query;
};

Dots dots(const float* key, const float* query, const float* other, int64_t width) {
  vfloat key_sum = splat(0.0f), query_sum = splat(0.0f);
  for (int64_t d = 0; d < width; d += kLanes) {
    const vfloat value = load(other + d);
    key_sum = muladd(load(key + d), value, key_sum);
    query_sum = muladd(load(query + d), value, query_sum);
  }
  return {reduce_add(key_sum), reduce_add(query_sum)};
}

void scale_row(float* row, vfloat factor, int64_t width) {
  for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) * factor);
}

void multiply_row(float* row, const float* factors, int64_t width) {
  for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) * load(factors + d));
}

void normalize_row(float* row, int64_t width) {
  const float sum = dots(row, row, row, width).key;
  scale_row(row, splat(1.0f / __builtin_sqrtf(sum + 1e-6f)), width);
}

// Keys, queries, decays and betas of the chunk in fp32.
void load_tokens(const Head& at, int32_t count) {
  const DeltaRuleParams& p = at.p;
  const DeltaScratch& s = at.s;
  const int64_t key_head = at.head / p.group_size, width = s.keys_width;
  for (int32_t i = 0; i < count; ++i) {
    const int64_t row = at.first_row + s.nodes[i];
    float *key = s.keys + i * width, *query = s.reads + (s.rows + i) * width;
    load_row(element(p.k, p.dtype, row * p.k_token_stride + key_head * p.k_head_stride), p.dtype, p.key_dim, key,
             width);
    if (p.l2norm) normalize_row(key, width);
    if (p.q != nullptr) {
      load_row(element(p.q, p.dtype, row * p.q_token_stride + key_head * p.q_head_stride), p.dtype, p.key_dim, query,
               width);
      if (p.l2norm) normalize_row(query, width);
    } else {
      for (int64_t d = 0; d < width; d += kLanes) store(query + d, splat(0.0f));
    }
    const float* g = p.g + row * p.g_token_stride + at.head * p.g_head_stride;
    if (p.channel_decay) {
      float* decays = s.decays + i * width;
      load_row(g, DType::kFloat32, p.key_dim, decays, width);
      for (int64_t d = 0; d < width; d += kLanes) store(decays + d, decay_of<VectorMath>(load(decays + d)));
    } else {
      s.decays[i] = decay_of<ScalarMath>(*g);
    }
    if (p.beta != nullptr) s.betas[i] = p.beta[row * p.beta_token_stride + at.head * p.beta_head_stride];
  }
}

// Walks up the path of token i: its weights of the tokens before it, and the rows that read the first state.
void weigh_path(const Head& at, int32_t i) {
  const DeltaScratch& s = at.s;
  const int64_t width = s.keys_width;
  float *key = s.reads + i * width, *query = s.reads + (s.rows + i) * width;
  float *key_weights = s.key_weights + i * s.rows, *query_weights = s.query_weights + i * s.rows;
  std::memcpy(key, s.keys + i * width, static_cast<size_t>(width) * sizeof(float));
  query_weights[i] = dots(key, query, key, width).query;
  float decay = 1.0f;
  for (int32_t above = i;;) {
    if (at.p.channel_decay) {
      multiply_row(key, s.decays + above * width, width);
      multiply_row(query, s.decays + above * width, width);
    } else {
      decay *= s.decays[above];
    }
    above = s.parents[above];
    if (above < 0) break;
    const Dots product = dots(key, query, s.keys + above * width, width);
    key_weights[above] = decay * product.key;
    query_weights[above] = decay * product.query;
  }
  if (at.p.channel_decay) return;
  scale_row(key, splat(decay), width);
  scale_row(query, splat(decay), width);
}

// u of token i in place of what its key read, and its output in place of what its query read.
void solve_token(const Head& at, int32_t i) {
  const DeltaRuleParams& p = at.p;
  const DeltaScratch& s = at.s;
  const int64_t width = s.values_width, row = at.first_row + s.nodes[i];
  float *u = s.values + i * width, *out = s.values + (s.rows + i) * width;
  const float *key_weights = s.key_weights + i * s.rows, *query_weights = s.query_weights + i * s.rows;
  const int64_t offset = row * p.v_token_stride + at.head * p.v_head_stride;
  const auto step = [&]<DType kType>(int64_t d) {
    const int64_t left = p.value_dim - d;
    const char* v = static_cast<const char*>(element(p.v, p.dtype, offset + d));
    const vfloat value = load_lanes<kType>(v, left);
    vfloat predicted = p.beta != nullptr ? load(u + d) : splat(0.0f);
    vfloat read = p.q != nullptr ? load(out + d) : splat(0.0f);
    for (int32_t above = s.parents[i]; above >= 0; above = s.parents[above]) {
      const vfloat before = load(s.values + above * width + d);
      predicted = muladd(splat(key_weights[above]), before, predicted);
      read = muladd(splat(query_weights[above]), before, read);
    }
    const vfloat own = p.beta != nullptr ? (value - predicted) * s.betas[i] : value;
    store(u + d, own);
    if (p.out == nullptr) return;
    read = muladd(splat(query_weights[i]), own, read) * p.scale;
    if constexpr (kType != DType::kFloat8E4M3) {
      char* to = static_cast<char*>(p.out) + ((row * p.num_heads + at.head) * p.value_dim + d) * element_size(kType);
      store_lanes<kType>(to, left, read);
    }
  };
  with_dtype(p.dtype, [&]<DType kType>() {
    for (int64_t d = 0; d < p.value_dim; d += kLanes) step.template operator()<kType>(d);
    for (int64_t d = ceil_div<int64_t>(p.value_dim, kLanes) * kLanes; d < width; d += kLanes) store(u + d, splat(0.0f));
  });
}

// The state behind the last token of a chain.
void carry_state(const Head& at, int32_t count) {
  const DeltaScratch& s = at.s;
  const int64_t width = s.keys_width, depth = at.p.key_dim;
  for (int64_t d = 0; d < width; d += kLanes) store(s.carry + d, splat(1.0f));
  for (int32_t i = count - 1; i >= 0; --i) {
    float* key = s.reads + i * width;
    for (int64_t d = 0; d < width; d += kLanes) store(key + d, load(s.carry + d) * load(s.keys + i * width + d));
    if (at.p.channel_decay) {
      multiply_row(s.carry, s.decays + i * width, width);
    } else {
      scale_row(s.carry, splat(s.decays[i]), width);
    }
  }
  constexpr int kRows = 4;  // of the state at a time; Dk is a multiple of 8
  for (int64_t n = 0; n < s.values_width; n += kPanel) {
    for (int64_t k = 0; k < depth; k += kRows) {
      float* to = s.state + n * depth + k * kPanel;
      vfloat sums[kRows][2];
      for (int r = 0; r < kRows; ++r) {
        sums[r][0] = load(to + r * kPanel) * s.carry[k + r];
        sums[r][1] = load(to + r * kPanel + kLanes) * s.carry[k + r];
      }
      for (int32_t i = 0; i < count; ++i) {
        const float* u = s.values + i * s.values_width + n;
        const vfloat first = load(u), second = load(u + kLanes);
        for (int r = 0; r < kRows; ++r) {
          const vfloat key = splat(s.reads[i * width + k + r]);
          sums[r][0] = muladd(key, first, sums[r][0]);
          sums[r][1] = muladd(key, second, sums[r][1]);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        store(to + r * kPanel, sums[r][0]);
        store(to + r * kPanel + kLanes, sums[r][1]);
      }
    }
  }
}

// The tokens in s.nodes and s.parents. Tokens of a chain may be carried into the state.
void run_chunk(const Head& at, int32_t count, bool carried) {
  const DeltaRuleParams& p = at.p;
  const DeltaScratch& s = at.s;
  const int64_t width = s.keys_width, half = s.rows;
  load_tokens(at, count);
  for (int32_t i = 0; i < count; ++i) weigh_path(at, i);
  const auto read = [&](int64_t first) {
    gemm<false>(s.reads + first * width, width, s.state, p.key_dim, nullptr, s.values + first * s.values_width,
                s.values_width, count, s.values_width);
  };
  if (p.beta != nullptr) read(0);
  if (p.q != nullptr) read(half);
  for (int32_t i = 0; i < count; ++i) solve_token(at, i);
  if (carried) carry_state(at, count);
}

// Between the caller's memory and panels [values_width / kPanel, Dk, kPanel] of zeros behind Dv.
template <bool kStore>
void move_state(const Head& at, int64_t slot) {
  const DeltaRuleParams& p = at.p;
  const int64_t depth = p.key_dim, key_stride = p.state_strides[2], value_stride = p.state_strides[3];
  if (!kStore) std::memset(at.s.state, 0, static_cast<size_t>(depth * at.s.values_width) * sizeof(float));
  if (slot < 0) return;
  float* state = p.state + slot * p.state_strides[0] + at.head * p.state_strides[1];
  for (int64_t n = 0; n < p.value_dim; n += kPanel) {
    const int64_t columns = min_of<int64_t>(kPanel, p.value_dim - n);
    for (int64_t k = 0; k < depth; ++k) {
      float* packed = at.s.state + n * depth + k * kPanel;
      float* from = state + k * key_stride + n * value_stride;
      for (int64_t c = 0; c < columns; ++c) {
        if (kStore) {
          from[c * value_stride] = packed[c];
        } else {
          packed[c] = from[c * value_stride];
        }
      }
    }
  }
}

}  // namespace

void delta_rule(const DeltaRuleParams& p, int64_t item, const DeltaScratch& scratch) {
  const RecurrentBatch& tokens = p.tokens;
  const int64_t b = item / p.num_heads;
  const NodeRange rows = node_range(tokens.cu_nodes, b, tokens.num_rows);
  Head at{p, scratch, rows.begin, item % p.num_heads};
  const bool writes = p.out == nullptr;
  const int64_t total = writes ? tokens_to_replay(tokens, b) : rows.size();
  if (total == 0) return;
  const int64_t slot = state_slot(tokens, b);
  move_state<false>(at, slot);
  if (!writes && tokens.parents != nullptr) {
    run_chunk(at, reachable_nodes(tokens, b, scratch.nodes, scratch.parents, scratch.place), false);
    return;
  }
  for (int64_t begin = 0; begin < total; begin += kCausalChunk) {
    const auto count = static_cast<int32_t>(min_of<int64_t>(kCausalChunk, total - begin));
    at.first_row = replayed_row(tokens, b, begin);
    for (int32_t i = 0; i < count; ++i) {
      scratch.nodes[i] = static_cast<int32_t>(replayed_row(tokens, b, begin + i) - at.first_row);
      scratch.parents[i] = i - 1;
    }
    run_chunk(at, count, writes || begin + count < total);
  }
  if (writes) move_state<true>(at, slot);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
