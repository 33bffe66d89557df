// Decays per key channel: products of decayed keys and queries with keys (docs/notes/recurrent.md).
//
// Paths are cut into blocks so that P[n], a channel's product of decays from the block's first token (exclusive) to n,
// is at least kLeastProduct. Within a block D(n, m) = P[n] / P[m], so the products are (k[n] * P[n]) . (k[m] / P[m]).
// For m in the previous block, with last token e, rows are multiplied by exp(g[first token]) * P[e]; likewise for
// earlier blocks. All factors except 1 / P[m] are at most 1.
#pragma once

#include "cpu/isa/recurrent/chunk.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

constexpr float kLeastProduct = 0x1p-60f;
// Tokens with more blocks or few ancestors traverse their paths. The choice depends only on a token's path.
constexpr int32_t kMaxBlocks = 4;
constexpr int32_t kTraversedAncestors = 8;

// Computes weights of token i by traversing its path, and rows that read the initial state.
static inline void compute_path_weights(const Head& at, int32_t i) {
  const DeltaScratch& s = at.s;
  const int64_t width = s.keys_width;
  float *key = s.decayed + i * width, *query = s.decayed + (s.rows + i) * width;
  const auto size = static_cast<size_t>(width) * sizeof(float);
  std::memcpy(key, s.keys + i * width, size);
  if (at.p.out != nullptr) {
    std::memcpy(query, s.keys + (s.rows + i) * width, size);
  } else {
    std::memset(query, 0, size);
  }
  vfloat own = splat(0.0f);
  for (int64_t d = 0; d < width; d += kLanes) own = muladd(load(query + d), load(key + d), own);
  s.query_weights[i * s.pairs_width + i] = reduce_add(own);
  for (int32_t token = i; token >= 0; token = s.parents[token]) {
    const float* decays = s.channel_decays + token * width;
    const int32_t above = s.parents[token];
    const float* other = s.keys + max_of(above, 0) * width;
    vfloat key_sum = splat(0.0f), query_sum = splat(0.0f);
    for (int64_t d = 0; d < width; d += kLanes) {
      const vfloat decay = load(decays + d), value = load(other + d);
      const vfloat decayed_key = load(key + d) * decay, decayed_query = load(query + d) * decay;
      store(key + d, decayed_key);
      store(query + d, decayed_query);
      key_sum = muladd(decayed_key, value, key_sum);
      query_sum = muladd(decayed_query, value, query_sum);
    }
    if (above < 0) break;
    s.key_weights[i * s.pairs_width + above] = reduce_add(key_sum);
    s.query_weights[i * s.pairs_width + above] = reduce_add(query_sum);
  }
}

// Cuts paths into blocks. P goes to s.block_decays, whole-path products to s.channel_path_decays. `first`: first token
// that uses blocks; `most`: maximum blocks of a path.
struct Blocks {
  int32_t first, most;
};
static inline Blocks cut_paths(const DeltaScratch& s) {
  const int64_t width = s.keys_width;
  Blocks found{s.count, 0};
  for (int32_t i = 0; i < s.count; ++i) {
    const int32_t parent = s.parents[i], above = max_of(parent, 0);
    const float* decays = s.channel_decays + i * width;
    float *within = s.block_decays + i * width, *path = s.channel_path_decays + i * width;
    PathBlock& block = s.blocks[i];
    block = parent < 0 ? PathBlock{.first = i} : s.blocks[parent];
    vint small = splat(parent < 0 ? -1 : 0);
    for (int64_t d = 0; d < width; d += kLanes) {
      const vfloat decay = load(decays + d);
      store(path + d, parent < 0 ? decay : decay * load(s.channel_path_decays + above * width + d));
      if (parent < 0) continue;
      const vfloat product = decay * load(s.block_decays + above * width + d);
      store(within + d, product);
      small |= product < splat(kLeastProduct);
    }
    if (lane_bits(small) != 0) {
      for (int64_t d = 0; d < width; d += kLanes) store(within + d, splat(1.0f));
      block.first = i;
      ++block.number;
    }
    block.walks = block.tokens++ < kTraversedAncestors || block.number > kMaxBlocks;
    if (!block.walks) found = {min_of(found.first, i), max_of(found.most, block.number)};
  }
  return found;
}

static inline void decay_rows(const Head& at, int32_t i, const float* rows, const float* first, const float* second) {
  const DeltaScratch& s = at.s;
  for (int half = 0; half < 2; ++half) {
    const bool is_query = half != 0;
    if (is_query ? at.p.out == nullptr : at.p.beta == nullptr) continue;
    const int64_t row = is_query ? s.rows + i : i;
    for (int64_t d = 0; d < s.keys_width; d += kLanes) {
      const vfloat decay = second == nullptr ? load(first + d) : load(first + d) * load(second + d);
      store(s.decayed + row * s.keys_width + d, load(rows + row * s.keys_width + d) * decay);
    }
  }
}

static inline void compute_block_weights(const Head& at, Blocks of) {
  const DeltaScratch& s = at.s;
  const int64_t width = s.keys_width;
  const bool with_keys = at.p.beta != nullptr, with_queries = at.p.out != nullptr;
  pack_keys(s,
            [&](int32_t i, int64_t d) { return load(s.keys + i * width + d) / load(s.block_decays + i * width + d); });
  for (int32_t number = 1; number <= of.most; ++number) {  // a token's block first
    const bool own = number == 1;
    for (int32_t i = of.first; i < s.count; ++i) {
      PathBlock& block = s.blocks[i];
      if (own) {
        block.end = i;
        decay_rows(at, i, s.keys, s.block_decays + i * width, nullptr);
      } else if (block.number >= number) {
        const int32_t begin = s.blocks[block.end].first;
        block.end = s.parents[begin];
        decay_rows(at, i, s.decayed, s.channel_decays + begin * width, s.block_decays + block.end * width);
      }
    }
    if (with_keys) multiply_rows(s, s.decayed, of.first, own ? s.key_weights : s.key_products);
    if (with_queries) multiply_rows(s, s.decayed + s.rows * width, of.first, own ? s.query_weights : s.query_products);
    for (int32_t i = of.first; i < s.count; ++i) {
      if (own || s.blocks[i].number < number) continue;
      const int64_t row = i * s.pairs_width;
      for (int32_t token = s.blocks[i].end, begin = s.blocks[token].first;; token = s.parents[token]) {
        if (with_keys) s.key_weights[row + token] = s.key_products[row + token];
        if (with_queries) s.query_weights[row + token] = s.query_products[row + token];
        if (token == begin) break;
      }
    }
  }
}

static inline void compute_channel_weights(const Head& at) {
  const DeltaScratch& s = at.s;
  const Blocks found = cut_paths(s);
  if (found.most > 0) compute_block_weights(at, found);
  for (int32_t i = 0; i < s.count; ++i) {
    if (s.blocks[i].walks) {
      compute_path_weights(at, i);
    } else {
      decay_rows(at, i, s.keys, s.channel_path_decays + i * s.keys_width, nullptr);
    }
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
