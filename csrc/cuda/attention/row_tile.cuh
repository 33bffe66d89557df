// An M tile of one KV head and sequence: its rows and their visible keys.
#pragma once

#include "core/math.h"
#include "cuda/attention/config.h"
#include "cuda/tile/reduce.cuh"

namespace pagedtree::cuda {

// The op's parameters and derived values. The host derives them, as the kernel's prologue dominates small calls.
struct AttentionParams : TreeAttentionParams {
  struct Part {
    const char* begin;
    int64_t bytes;  // between items
  };
  Part parts[3];  // page ids per sequence, K and V per head
  SmallDivisor by_group_size, by_page_size;
  uint32_t pages_end;                 // valid page numbers are below it
  int32_t keys_in_window, mask_bits;  // clamped to 2^31 - 1
  float factor;                       // q.k * scale to base-2 scores; softcap: to the exponent of tanh

  explicit AttentionParams(const TreeAttentionParams& p)
      : TreeAttentionParams(p),
        parts{{reinterpret_cast<const char*>(p.table.pages), p.table.row_stride * int64_t{sizeof(int32_t)}},
              part_of(p.k_cache, p.kv_dtype),
              part_of(p.v_cache, p.kv_dtype)},
        by_group_size(p.group_size),
        by_page_size(p.table.page_size),
        pages_end(static_cast<uint32_t>(min_of<int64_t>(p.num_pages, int64_t{1} << 31))),
        keys_in_window(static_cast<int32_t>(min_of<int64_t>(p.window > 0 ? p.window : INT32_MAX, INT32_MAX))),
        mask_bits(static_cast<int32_t>(min_of<int64_t>(int64_t{p.mask_words} * kMaskWordBits, INT32_MAX))),
        factor(p.softcap == 0.0f ? kLog2E : 2.0f * kLog2E / p.softcap) {}

  static Part part_of(const PagedCache& cache, DType dtype) {
    return {static_cast<const char*>(cache.data), cache.head_stride * element_size(dtype)};
  }
};

// Returns the positive factor of q.k for base-2 scores, or with softcap for the exponent in tanh(x) = 1 - 2 / (2^(x * 2
// log2 e) + 1). The sign is in q. Not 0, as it multiplies maxima, which may be -inf.
PT_HOST_DEVICE float score_factor(const AttentionParams& p, float scale) {
  return fmaxf(fabsf(scale) * p.factor, 0x1p-126f);
}

// Returns the launch's work with compile-time divisors.
template <typename I>
__device__ __forceinline__ WorkShape work_of(const WorkShape& shape) {
  WorkShape known = shape;
  known.m_tile = I::kMTile;
  known.few_rows_heads = 1;
  return known;
}

// A CTA's index among the CTAs that share a range's row tiles; `cta` is its index in the launch.
struct Share {
  int32_t sharers, cta, range;

  __device__ __forceinline__ static Share of(int32_t sharers, int32_t cta) {
    // Exact for up to kMostSharers.
    const float range = (static_cast<float>(cta) + 0.5f) * __fdividef(1.0f, static_cast<float>(sharers));
    return {sharers, cta, sharers == 1 ? cta : static_cast<int32_t>(range)};
  }
  __device__ __forceinline__ int32_t part() const { return cta - range * sharers; }
};

struct RowSpan {
  uint32_t begin, end;
  __device__ __forceinline__ bool has(uint32_t row) const { return begin <= row && row < end; }
};

// A row tile's position in Q and the output.
struct TileRows {
  uint32_t rows;
  int32_t kv_head;
  uint32_t first_row;   // within the head's (query, group head) rows
  int32_t first_token;  // of the sequence

  __device__ __forceinline__ uint32_t query_of(const AttentionParams& p, uint32_t row) const {
    return p.by_group_size.quotient(first_row + row);
  }
  __device__ __forceinline__ int64_t token(const AttentionParams& p, uint32_t row) const {
    return static_cast<uint32_t>(first_token) + query_of(p, row);
  }
  __device__ __forceinline__ int64_t head(const AttentionParams& p, uint32_t row) const {
    return static_cast<uint32_t>(kv_head * p.group_size) + p.by_group_size.remainder(first_row + row);
  }
  __device__ __forceinline__ RowSpan rows_of_query(const AttentionParams& p, uint32_t begin) const {
    return {begin, min_of(begin + p.group_size - p.by_group_size.remainder(first_row + begin), rows)};
  }
};

struct RowTile : TileRows {
  int32_t sequence;
  int32_t num_queries;
  int32_t seq_len;
  int32_t tree_len = -1;  // -1: causal

  __device__ __forceinline__ int32_t kv_tiles() const { return kv_tiles_of(seq_len); }
  __device__ __forceinline__ bool has_windows(const AttentionParams& p) const {
    return tree_len >= 0 && p.keys_in_window < INT32_MAX;
  }
  // Returns a row's visible keys, given its tree window. Rows past the end repeat the last one.
  __device__ __forceinline__ Visibility visibility(const AttentionParams& p, uint32_t row, TreeWindow window) const {
    const uint32_t query = query_of(p, min_of(row, rows - 1));
    if (tree_len < 0) {  // causal_visibility() with 31-bit windows
      const int32_t end = max_of(seq_len + min_of(static_cast<int32_t>(query + 1 - num_queries), 0), 0);
      return {max_of(end - p.keys_in_window, 0), end, seq_len, nullptr, 0, 0, 0};
    }
    const int32_t start = seq_len - tree_len;
    const int32_t* words = p.tree_mask + (static_cast<uint32_t>(first_token) + query) * p.mask_stride;
    return {window.begin, start, start, words, p.mask_words, window.first_bit, min_of(tree_len, p.mask_bits)};
  }
};

// Returns the rows of row tile `index` for one of the CTAs that share it, m_tile rows each; may be empty.
__device__ __forceinline__ RowTile row_tile(const AttentionParams& p, const SequenceWork& work, int32_t sequence,
                                            int32_t index, int32_t m_tile, int32_t part) {
  RowTile tile{};
  tile.sequence = sequence;
  tile.kv_head = index / work.m_tiles;
  tile.first_token = static_cast<int32_t>(work.tokens.begin);
  tile.num_queries = static_cast<int32_t>(work.tokens.size());
  tile.seq_len = work.seq_len;
  const auto tile_rows = static_cast<uint32_t>(m_tile);
  tile.first_row =
      static_cast<uint32_t>(index % work.m_tiles) * work.tile_rows + static_cast<uint32_t>(part) * tile_rows;
  tile.rows = tile.first_row < work.rows ? min_of(work.rows - tile.first_row, tile_rows) : 0;
  tile.tree_len = tree_length(p, sequence, tile.num_queries, work.seq_len);
  return tile;
}

// Rare, not inlined. Not for wgmma kernels: with function calls ptxas ignores setmaxnreg.
__device__ inline __attribute__((noinline)) TreeWindow rare_tree_window(const int32_t* words, int32_t num_words,
                                                                        int32_t num_bits, int32_t tree_start,
                                                                        int64_t window) {
  return tree_window(words, num_words, num_bits, tree_start, window);
}

__device__ __forceinline__ Visibility row_visibility(const AttentionParams& p, const RowTile& tile, uint32_t row) {
  Visibility seen = tile.visibility(p, row, {});
  if (tile.has_windows(p)) {
    seen.narrow(rare_tree_window(seen.words, p.mask_words, seen.num_bits, seen.tree_start, p.keys_in_window));
  }
  return seen;
}

// The per-row part of a Visibility, kept by each thread.
struct RowView {
  int32_t begin, end;
  int32_t first_bit;
  const int32_t* words;  // null: no tree

  __device__ __forceinline__ static RowView of(const Visibility& v) { return {v.begin, v.end, v.first_bit, v.words}; }
  __device__ __forceinline__ Visibility expand(const AttentionParams& p, const RowTile& tile) const {
    if (words == nullptr) return {begin, end, tile.seq_len, nullptr, 0, 0, 0};
    return {begin,        end,       tile.seq_len - tile.tree_len,      words,
            p.mask_words, first_bit, min_of(tile.tree_len, p.mask_bits)};
  }
};

// Keys outside [lowest, highest) are masked for all rows; keys in [plain_begin, plain_end) for none.
struct KeyBounds {
  int32_t lowest, highest;
  int32_t plain_begin, plain_end;

  __device__ __forceinline__ static KeyBounds none() {
    constexpr int32_t kLast = 0x7fffffff;
    return {kLast, 0, 0, kLast};
  }
  __device__ __forceinline__ static KeyBounds of(const Visibility& v) {
    return {v.lowest(), v.highest(), v.begin, v.end};
  }
  __device__ __forceinline__ KeyBounds join(const KeyBounds& other) const {
    return {min_of(lowest, other.lowest), max_of(highest, other.highest), max_of(plain_begin, other.plain_begin),
            min_of(plain_end, other.plain_end)};
  }
  __device__ __forceinline__ bool is_unmasked(int32_t first_key, int32_t count) const {
    return plain_begin <= first_key && first_key <= plain_end - count;
  }
  __device__ __forceinline__ KeyBounds over_warp() const {
    return {__reduce_min_sync(kWholeWarp, lowest), __reduce_max_sync(kWholeWarp, highest),
            __reduce_max_sync(kWholeWarp, plain_begin), __reduce_min_sync(kWholeWarp, plain_end)};
  }
};

// Mask of a stage's keys for rows quad and quad + 8 of a block. Bit i of word w: the warp's key 32 w + i.
template <int kWords>
struct VisibleKeys {
  uint32_t rows[2][kWords];

  __device__ __forceinline__ void hide_from(int key) {
#pragma unroll
    for (int w = key / kMaskWordBits; w < kWords; ++w) rows[0][w] = rows[1][w] = 0;
  }
};

// Each lane computes the words of own_row(); shuffles distribute them.
__device__ __forceinline__ uint32_t own_row(uint32_t lane) { return lane / 4 + lane / 2 % 2 * 8; }

template <int kWords>
__device__ __forceinline__ VisibleKeys<kWords> visible_keys(const Visibility& mine, uint32_t lane, int32_t first_key) {
  VisibleKeys<kWords> keys;
  constexpr int kAtOnce = min_of(kWords, 2);  // words per row
#pragma unroll
  for (int first = 0; first < kWords; first += kAtOnce) {
    const uint32_t word = mine.visible32(first_key + (first + static_cast<int32_t>(lane % kAtOnce)) * kMaskWordBits);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) {
        keys.rows[half][first + w] = __shfl_sync(kWholeWarp, word, static_cast<int>(lane & ~3u) | half * 2 | w);
      }
    }
  }
  return keys;
}

}  // namespace pagedtree::cuda
