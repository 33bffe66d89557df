// Gated delta rule over a chunk of tokens, each after its parent (docs/notes/recurrent.md).
// S' = decay * S[parent];  u = beta * (v - S'^T k);  S = S' + k u^T;  out = scale * S^T q
#include "cpu/isa/recurrent/channel_decays.h"
#include "cpu/isa/recurrent/state_panels.h"
#include "cpu/isa/tile/math.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

const void* element(const void* data, DType dtype, int64_t offset) {
  return static_cast<const char*>(data) + offset * element_size(dtype);
}

void scale_row(float* row, vfloat factor, int64_t width) {
  for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) * factor);
}

void normalize_row(float* row, int64_t width, float eps) {
  vfloat sum = splat(0.0f);
  for (int64_t d = 0; d < width; d += kLanes) sum = muladd(load(row + d), load(row + d), sum);
  scale_row(row, splat(1.0f / __builtin_sqrtf(reduce_add(sum) + eps)), width);
}

void load_keys(const Head& at) {
  const DeltaRuleParams& p = at.p;
  const DeltaScratch& s = at.s;
  const int64_t key_head = at.head / p.group_size, width = s.keys_width;
  for (int32_t i = 0; i < s.count; ++i) {
    const int64_t row = at.first_row + s.nodes[i];
    float *key = s.keys + i * width, *query = s.keys + (s.rows + i) * width;
    load_row(element(p.k, p.dtype, row * p.k_token_stride + key_head * p.k_head_stride), p.dtype, p.key_dim, key,
             width);
    if (p.l2norm) normalize_row(key, width, p.l2norm_eps);
    if (p.out == nullptr) continue;
    load_row(element(p.q, p.dtype, row * p.q_token_stride + key_head * p.q_head_stride), p.dtype, p.key_dim, query,
             width);
    if (p.l2norm) normalize_row(query, width, p.l2norm_eps);
  }
}

void multiply_keys(const Head& at) {
  const DeltaScratch& s = at.s;
  pack_keys(s, [&](int32_t i, int64_t d) { return load(s.keys + i * s.keys_width + d); });
  if (at.p.beta != nullptr) multiply_rows(s, s.keys, 0, s.key_weights);
  if (at.p.out != nullptr) multiply_rows(s, s.keys + s.rows * s.keys_width, 0, s.query_weights);
}

void load_decays(const Head& at) {
  const DeltaRuleParams& p = at.p;
  const DeltaScratch& s = at.s;
  for (int32_t i = 0; i < s.count; ++i) {
    const int64_t row = at.first_row + s.nodes[i];
    const float* g = p.g + row * p.g_token_stride + at.head * p.g_head_stride;
    if (p.channel_decay) {
      float* decays = s.channel_decays + i * s.keys_width;
      load_row(g, DType::kFloat32, p.key_dim, decays, s.keys_width);
      for (int64_t d = 0; d < s.keys_width; d += kLanes) store(decays + d, decay_of<VectorMath>(load(decays + d)));
    }
    s.decays[i] = p.channel_decay ? 1.0f : decay_of<ScalarMath>(*g);
    s.path_decays[i] = s.parents[i] < 0 ? s.decays[i] : s.decays[i] * s.path_decays[s.parents[i]];
    if (p.beta != nullptr) s.betas[i] = p.beta[row * p.beta_token_stride + at.head * p.beta_head_stride];
  }
}

#if defined(__AVX512F__)
constexpr int kWide = 8;  // vectors in registers
#else
constexpr int kWide = 4;
#endif

// Replaces, for token i and kVectors vectors from column d on, the key's read by u and the query's by the output.
template <bool kDelta, bool kRead, int kVectors>
void solve_token(const Head& at, int32_t i, int64_t d) {
  const DeltaRuleParams& p = at.p;
  const DeltaScratch& s = at.s;
  const int64_t row = at.first_row + s.nodes[i], columns = min_of<int64_t>(p.value_dim - d, kVectors * kLanes);
  const int64_t v = row * p.v_token_stride + at.head * p.v_head_stride + d;
  const int64_t to = (row * p.num_heads + at.head) * p.value_dim + d;
  float *u = s.values + i * s.values_width + d, *out = s.values + (s.rows + i) * s.values_width + d;
  const float *key_weights = s.key_weights + i * s.pairs_width, *query_weights = s.query_weights + i * s.pairs_width;
  // Nothing is left of a fully decayed state, not even infinity.
  const bool reached = s.path_decays[i] != 0.0f;
  const auto from_state = [&](const float* from) { return reached ? load(from) * s.path_decays[i] : splat(0.0f); };
  vfloat predicted[kVectors], read[kVectors];
  for (int c = 0; c < kVectors; ++c) {
    if (kDelta) predicted[c] = from_state(u + c * kLanes);
    if (kRead) read[c] = from_state(out + c * kLanes);
  }
  float decay = s.decays[i];
  for (int32_t above = kDelta || kRead ? s.parents[i] : -1; above >= 0; above = s.parents[above]) {
    const vfloat key_weight = splat(kDelta ? decay * key_weights[above] : 0.0f);
    const vfloat query_weight = splat(kRead ? decay * query_weights[above] : 0.0f);
    const float* before = s.values + above * s.values_width + d;
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) {
      const vfloat x = load(before + c * kLanes);
      if (kDelta) predicted[c] = muladd(key_weight, x, predicted[c]);
      if (kRead) read[c] = muladd(query_weight, x, read[c]);
    }
    decay *= s.decays[above];
  }
  load_row(element(p.v, p.dtype, v), p.dtype, columns, s.value, kVectors * kLanes);
  for (int c = 0; c < kVectors; ++c) {
    const vfloat value = load(s.value + c * kLanes);
    const vfloat own = kDelta ? (value - predicted[c]) * s.betas[i] : value;
    store(u + c * kLanes, own);
    if (kRead) store(out + c * kLanes, muladd(splat(query_weights[i]), own, read[c]) * p.scale);
  }
  if (kRead) store_row(out, p.dtype, columns, static_cast<char*>(p.out) + to * element_size(p.dtype));
}

// Parents first. Few columns at a time keep u in the nearest cache.
template <bool kDelta, bool kRead>
void solve_chunk(const Head& at) {
  int64_t d = 0;
  for (; d + kWide * kLanes <= at.s.values_width; d += kWide * kLanes) {
    for (int32_t i = 0; i < at.s.count; ++i) solve_token<kDelta, kRead, kWide>(at, i, d);
  }
  for (; d < at.s.values_width; d += kPanel) {
    for (int32_t i = 0; i < at.s.count; ++i) solve_token<kDelta, kRead, 2>(at, i, d);
  }
}

void carry_state(const Head& at) {
  const DeltaScratch& s = at.s;
  const int64_t width = s.keys_width, depth = at.p.key_dim;
  const float* keys = at.p.channel_decay ? s.decayed : s.keys;
  for (int64_t d = 0; d < width; d += kLanes) store(s.carry + d, splat(1.0f));
  for (int32_t i = s.count - 1; i >= 0; --i) {
    if (at.p.channel_decay) {
      float *key = s.decayed + i * width, *decays = s.channel_decays + i * width;
      for (int64_t d = 0; d < width; d += kLanes) {
        store(key + d, load(s.carry + d) * load(s.keys + i * width + d));
        store(s.carry + d, load(s.carry + d) * load(decays + d));
      }
    } else {
      scale_row(s.values + i * s.values_width, load(s.carry), s.values_width);
      scale_row(s.carry, splat(s.decays[i]), width);
    }
  }
  constexpr int kRows = kWide;  // rows at a time; Dk is a multiple of 8
  for (int64_t n = 0; n < s.values_width; n += kPanel) {
    for (int64_t k = 0; k < depth; k += kRows) {
      float* to = s.state + n * depth + k * kPanel;
      vfloat sums[kRows][2];
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < 2; ++c) {
          const vfloat kept = load(to + r * kPanel + c * kLanes) * s.carry[k + r];
          sums[r][c] = s.carry[k + r] != 0.0f ? kept : splat(0.0f);
        }
      }
      for (int32_t i = 0; i < s.count; ++i) {
        const float* u = s.values + i * s.values_width + n;
        const vfloat first = load(u), second = load(u + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const vfloat key = splat(keys[i * width + k + r]);
          sums[r][0] = muladd(key, first, sums[r][0]);
          sums[r][1] = muladd(key, second, sums[r][1]);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < 2; ++c) store(to + r * kPanel + c * kLanes, sums[r][c]);
      }
    }
  }
}

// Runs the tokens in s.nodes and s.parents, whose keys are loaded.
void run_chunk(const Head& at) {
  const DeltaRuleParams& p = at.p;
  const DeltaScratch& s = at.s;
  load_decays(at);
  if (p.channel_decay) compute_channel_weights(at);
  const float* rows = p.channel_decay ? s.decayed : s.keys;
  const auto read = [&](int64_t first) {
    gemm<false>(rows + first * s.keys_width, s.keys_width, s.state, p.key_dim, nullptr,
                s.values + first * s.values_width, s.values_width, s.count, s.values_width);
  };
  if (p.beta != nullptr) read(0);
  if (p.out != nullptr) read(s.rows);
  if (p.beta != nullptr) {
    p.out != nullptr ? solve_chunk<true, true>(at) : solve_chunk<true, false>(at);
  } else {
    p.out != nullptr ? solve_chunk<false, true>(at) : solve_chunk<false, false>(at);
  }
}

}  // namespace

void delta_rule(const DeltaRuleParams& p, int64_t item, DeltaScratch& s) {
  const RecurrentBatch& tokens = p.tokens;
  const int64_t b = item / p.num_heads, group = item / p.group_size;
  const NodeRange rows = node_range(tokens.cu_nodes, tokens.batch, b, tokens.num_rows);
  Head at{p, s, rows.begin, item % p.num_heads};
  const bool writes = p.out == nullptr, whole_tree = !writes && tokens.parents != nullptr;
  const int64_t total = writes ? tokens_to_replay(tokens, b) : rows.size();
  if (total == 0) return;
  const int64_t state_index = state_index_of(tokens, b), step = whole_tree ? total : kCausalChunk;
  move_state<false>(p, state_index, at.head, s.state, s.values_width);
  for (int64_t begin = 0; begin < total; begin += step) {
    if (!whole_tree) at.first_row = replayed_row(tokens, b, begin);
    if (s.loaded != group) {
      if (whole_tree) {
        s.count = reachable_nodes(tokens, b, s.nodes, s.parents, s.place);
      } else {
        s.count = static_cast<int32_t>(min_of<int64_t>(step, total - begin));
        for (int32_t i = 0; i < s.count; ++i) {
          s.nodes[i] = static_cast<int32_t>(replayed_row(tokens, b, begin + i) - at.first_row);
          s.parents[i] = i - 1;
        }
      }
      load_keys(at);
      if (!p.channel_decay) multiply_keys(at);
      s.loaded = total <= step ? group : -1;
    }
    run_chunk(at);
    if (!whole_tree && (writes || begin + step < total)) carry_state(at);
  }
  if (writes) move_state<true>(p, state_index, at.head, s.state, s.values_width);
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
