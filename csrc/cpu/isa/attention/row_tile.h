// A row tile of one sequence, per KV head: its rows, visibility, key addresses and output.
#pragma once

#include "core/math.h"
#include "cpu/attention_work.h"
#include "cpu/isa/tile/convert.h"
#include "cpu/isa/tile/exp2.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Zeros in place of K or V rows that have no page or are invisible to all rows.
constexpr int64_t kMaxHeadDim = 576, kMaxHeadDimV = 512;
alignas(64) static constexpr char kZeroRow[kMaxHeadDim * 4] = {};

struct RowTile {
  int64_t sequence;
  int32_t kv_head;
  SequenceWork work;
  int32_t heads;      // heads that share the tile, from this one on
  int64_t first_row;  // among the sequence's rows of this head
  int32_t rows;       // per head

  int64_t token(const TreeAttentionParams& p, int64_t r) const {
    return work.tokens.begin + (first_row + r) / p.group_size;
  }
  int64_t head(const TreeAttentionParams& p, int64_t r) const {
    return int64_t{kv_head} * p.group_size + (first_row + r) % p.group_size;
  }
  RowTile only(int32_t h) const {
    RowTile tile = *this;
    tile.kv_head += h;
    tile.heads = 1;
    return tile;
  }
};

static inline RowTile row_tile(const TreeAttentionParams& p, const WorkShape& shape, int64_t sequence, int32_t index) {
  RowTile tile{};
  tile.sequence = sequence;
  tile.work = sequence_work(shape, sequence);
  tile.kv_head = index / tile.work.m_tiles * tile.work.tile_heads;
  tile.heads = min_of(tile.work.tile_heads, shape.num_kv_heads - tile.kv_head);
  tile.first_row = int64_t{index % tile.work.m_tiles} * kMTile;
  const int64_t rows = tile.work.tokens.size() * p.group_size - tile.first_row;
  tile.rows = static_cast<int32_t>(min_of<int64_t>(rows, kMTile));
  return tile;
}

static inline const char* q_row(const TreeAttentionParams& p, const RowTile& tile, int64_t r) {
  const int64_t offset = tile.token(p, r) * p.q_token_stride + tile.head(p, r) * p.q_head_stride;
  return static_cast<const char*>(p.q) + offset * element_size(p.q_dtype);
}

struct TileVisibility {
  Visibility tokens[kMTile];
  int32_t count;
  int64_t lowest, highest;         // no row sees a key outside
  int64_t plain_begin, plain_end;  // every row sees every key inside
};

// Returns query i's visible keys; `tree_len` is the sequence's tree_length().
static inline Visibility query_visibility(const TreeAttentionParams& p, const SequenceWork& work, int64_t tree_len,
                                          int64_t i) {
  if (tree_len < 0) return causal_visibility(work.seq_len, work.tokens.size(), i, p.window);
  const int32_t* words = p.tree_mask + (work.tokens.begin + i) * p.mask_stride;
  return tree_visibility(work.seq_len, tree_len, words, p.mask_words, p.window);
}

static inline void see(const TreeAttentionParams& p, const RowTile& tile, TileVisibility& seen) {
  const SequenceWork& work = tile.work;
  const int64_t n = work.tokens.size();
  const int64_t first = tile.first_row / p.group_size;
  seen.count = static_cast<int32_t>((tile.first_row + tile.rows - 1) / p.group_size - first + 1);
  const int64_t tree_len = tree_length(p, tile.sequence, n, work.seq_len);
  seen.lowest = seen.plain_end = work.seq_len;
  seen.highest = seen.plain_begin = 0;
  for (int32_t i = 0; i < seen.count; ++i) {
    const Visibility v = seen.tokens[i] = query_visibility(p, work, tree_len, first + i);
    seen.lowest = min_of<int64_t>(seen.lowest, v.lowest());
    seen.highest = max_of<int64_t>(seen.highest, v.highest());
    seen.plain_begin = max_of<int64_t>(seen.plain_begin, v.begin);
    seen.plain_end = min_of<int64_t>(seen.plain_end, v.end);
  }
}

// Writes visible keys of a KV tile as bits per token. Returns their union.
static inline uint64_t visible_keys(const TileVisibility& seen, int64_t first_key, uint64_t* bits) {
  const auto key = static_cast<int32_t>(first_key);
  uint64_t any = 0;
  for (int32_t i = 0; i < seen.count; ++i) {
    const Visibility& v = seen.tokens[i];
    bits[i] = v.visible32(key) | static_cast<uint64_t>(v.visible32(key + kMaskWordBits)) << kMaskWordBits;
    any |= bits[i];
  }
  return any;
}

constexpr uint64_t kAllKeys = ~uint64_t{0};

// K and V rows of one KV tile; kZeroRow for unwanted keys or missing pages.
struct KeyRows {
  const char* k[kKvTile];
  const char* v[kKvTile];
};

static inline void find_key_rows(const TreeAttentionParams& p, const RowTile& tile, int64_t first_key, uint64_t wanted,
                                 KeyRows& rows) {
  const int64_t size = element_size(p.kv_dtype);
  const int32_t* pages = p.table.pages + tile.sequence * p.table.row_stride;
  const int64_t count = min_of<int64_t>(kKvTile, tile.work.seq_len - first_key);
  int64_t page = first_key / p.table.page_size, offset = first_key % p.table.page_size;
  for (int64_t key = 0; key < kKvTile;) {
    const int64_t id = key < count ? pages[page] : -1;
    const bool known = id >= 0 && id < p.num_pages;
    const int64_t end = key < count ? min_of<int64_t>(key + p.table.page_size - offset, count) : kKvTile;
    const PagedCache &kc = p.k_cache, &vc = p.v_cache;
    for (; key < end; ++key, ++offset) {
      const bool read = known && (wanted >> key & 1u) != 0;
      const int64_t k_offset = id * kc.page_stride + offset * kc.slot_stride + tile.kv_head * kc.head_stride;
      const int64_t v_offset = id * vc.page_stride + offset * vc.slot_stride + tile.kv_head * vc.head_stride;
      rows.k[key] = read ? static_cast<const char*>(kc.data) + k_offset * size : kZeroRow;
      rows.v[key] = read ? static_cast<const char*>(vc.data) + v_offset * size : kZeroRow;
    }
    ++page;
    offset = 0;
  }
}

// Prefetches a KV tile in equal shares during the previous tile's arithmetic.
struct TilePrefetch {
  const KeyRows& rows;
  int64_t k_bytes, v_bytes;
  int64_t key = 0, offset = 0;

  TilePrefetch(const TreeAttentionParams& p, const KeyRows& next)
      : rows(next),
        k_bytes(p.head_dim * element_size(p.kv_dtype)),
        v_bytes(p.latent ? 0 : p.head_dim_v * element_size(p.kv_dtype)) {}

  int64_t lines() const { return kKvTile * (k_bytes + v_bytes) / 64; }

  void step(int64_t lines) {
    for (; lines > 0 && key < kKvTile; --lines) {
      __builtin_prefetch(offset < k_bytes ? rows.k[key] + offset : rows.v[key] + offset - k_bytes, 0, 2);
      offset += 64;
      if (offset >= k_bytes + v_bytes) offset = 0, ++key;
    }
  }
};

static inline void step_head(const TreeAttentionParams& p, KeyRows& rows) {
  const int64_t size = element_size(p.kv_dtype);
  const int64_t k_step = p.k_cache.head_stride * size, v_step = p.v_cache.head_stride * size;
  for (int64_t key = 0; key < kKvTile; ++key) {
    if (rows.k[key] == kZeroRow) continue;
    rows.k[key] += k_step;
    rows.v[key] += v_step;
  }
}

// Selects the share of a tile's rows, of all heads in memory order, to prefetch during head h of the previous tile.
// `first`: the first head's rows.
static inline void prefetch_share(const TreeAttentionParams& p, int32_t h, int32_t heads, const KeyRows& first,
                                  KeyRows& share) {
  const int64_t size = element_size(p.kv_dtype);
  const int64_t k_step = p.k_cache.head_stride * size, v_step = p.v_cache.head_stride * size;
  const bool heads_first = p.k_cache.head_stride < p.k_cache.slot_stride;
  int64_t key = heads_first ? h * int64_t{kKvTile} / heads : 0;
  int64_t head = heads_first ? h * int64_t{kKvTile} % heads : h;
  for (int64_t i = 0; i < kKvTile; ++i) {
    share.k[i] = first.k[key] + head * k_step;
    share.v[i] = first.v[key] + head * v_step;
    if (heads_first && ++head < heads) continue;
    if (heads_first) head = 0;
    ++key;
  }
}

// Writes row r; `out` is sum 2^(score - maximum) V, scores in base 2.
static inline void finish_row(const TreeAttentionParams& p, const RowTile& tile, int64_t r, const float* out,
                              float maximum, float sum) {
  const int64_t token = tile.token(p, r), head = tile.head(p, r);
  float factor = 1.0f;
  if (p.sinks != nullptr && p.sinks[head] > -kInfinity) {
    const float sink = p.sinks[head] * kLog2E, top = sink > maximum ? sink : maximum;
    factor = __builtin_exp2f(maximum - top);
    sum = sum * factor + __builtin_exp2f(sink - top);
    maximum = top;
  }
  const float v_scale = p.v_scale != nullptr ? p.v_scale[tile.kv_head * p.v_scale_stride] : 1.0f;
  const vfloat scale = splat(sum == 0.0f ? 0.0f : factor * v_scale / sum);
  const int64_t offset = token * p.out_token_stride + head * p.out_head_stride;
  with_dtype(p.q_dtype, [&]<DType kType>() {
    if constexpr (kType != DType::kFloat8E4M3) {
      char* row = static_cast<char*>(p.out) + offset * element_size(kType);
      for (int64_t d = 0; d < p.head_dim_v; d += kLanes) {
        store_float<kType>(row + d * element_size(kType), load(out + d) * scale);
      }
    }
  });
  if (p.lse != nullptr) {
    const float lse = sum == 0.0f ? -kInfinity : maximum * kLn2 + __builtin_logf(sum);
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = lse;
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
