// Order of attention work, equal for all backends; ranges.h cuts it.
// for sequence, row tile, KV tile: one linear order, cut into ranges of equal cost (KV tiles with a visible key)
//
// A row tile is `m_tile` consecutive rows r = token * group_size + query head of one KV head. If heads have few rows,
// several may share a row tile: their keys are adjacent, so memory is read in order. A row tile that a cut crosses is
// computed in pieces, which are merged later. A range leaves at most two partial results, so the number of ranges
// bounds the scratch.
//
// If the keys of a head exceed a cache, several CTAs may share a row tile: each computes m_tile rows of it over the
// same ranges, so that they read each key at the same time, once from memory. A batch is one list of sequences, or two:
// those with few rows in small tiles, the others in large tiles.
//
// A plan holds each list's range starts and its number of sharers. A range ends where the next begins. Any ordered
// plan, even a stale one, therefore covers all work exactly once; at worst it is badly balanced. Other data of a CUDA
// plan is valid only for its lengths.
#pragma once

#include "core/attention.h"
#include "core/divisor.h"
#include "core/tree.h"

namespace pagedtree {

constexpr int kKvTile = 64;           // keys per KV tile, aligned to its multiples
constexpr int kMaxPlanRanges = 1024;  // maximum of all backends
constexpr int kMostSharers = 8;       // CTAs per row tile
constexpr int kPlanEntry = 16;        // int32 words: sequence, row tile, KV tile, ...; entry 0: {ranges, sharers}
constexpr int kListSize = kPlanEntry * (kMaxPlanRanges + 1);

// All sequences, with at most kSmallRows rows per KV head, the others.
enum class WorkList : int32_t { kAll, kSmall, kLarge };
constexpr WorkList kWorkLists[] = {WorkList::kAll, WorkList::kSmall, WorkList::kLarge};
constexpr int64_t kSmallRows = 32;
constexpr int kPlanSize = 3 * kListSize;

#if !defined(PAGEDTREE_PIECE_COST)  // comparison builds set another (cuda/tile/variants.h)
#define PAGEDTREE_PIECE_COST 1
#endif
constexpr int kPieceCost = PAGEDTREE_PIECE_COST;  // KV tiles per further piece in a range

// Returns at least one KV tile, because the output must be written.
PT_HOST_DEVICE int32_t kv_tiles_of(int32_t seq_len) {
  return static_cast<int32_t>((static_cast<uint32_t>(max_of(seq_len, 1)) + kKvTile - 1) / kKvTile);
}

struct WorkShape {
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* tree_lens;     // [B]
  int32_t without_trees;        // -1: queries count as causal, a good estimate for small trees; else 0
  int64_t batch;
  int64_t num_tokens;   // T, padding included
  int64_t max_seq_len;  // bound on seq_lens
  int32_t window;       // INT32_MAX: none
  int32_t num_kv_heads;
  int32_t group_size;  // query heads per KV head
  SmallDivisor by_group_size;
  int32_t m_tile;
  int32_t few_rows = 0;        // heads with at most this many rows
  int32_t few_rows_heads = 1;  // share row tiles, up to this many KV heads
  WorkList list = WorkList::kAll;
  int32_t segment = 0;  // KV tiles, see core/segments.h; 0: none
  SmallDivisor by_segment;
  uint32_t least_rows = 0, more_rows = INT32_MAX;  // its sequences' rows: minimum, maximum minus minimum

  PT_HOST_DEVICE int m_tile_bits() const { return popcount32(static_cast<uint32_t>(m_tile) - 1); }  // a power of two
  PT_HOST_DEVICE bool takes(uint32_t rows) const { return rows - least_rows <= more_rows; }
  PT_HOST_DEVICE int32_t segment_begin(int32_t kv_tile) const {
    return kv_tile - static_cast<int32_t>(by_segment.remainder(static_cast<uint32_t>(kv_tile)));
  }
};

PT_HOST_DEVICE int64_t max_seq_len_of(const AttentionPlanParams& p) { return p.max_seq_len; }
PT_HOST_DEVICE int64_t max_seq_len_of(const TreeAttentionParams& p) {
  return min_of<int64_t>(p.table.max_pages * p.table.page_size, INT32_MAX);
}

template <typename Params>
WorkShape work_shape(const Params& p, int32_t m_tile, WorkList list = WorkList::kAll) {
  WorkShape shape{};
  shape.seq_lens = p.seq_lens;
  shape.cu_seqlens_q = p.cu_seqlens_q;
  shape.tree_lens = p.tree_lens != nullptr ? p.tree_lens : p.seq_lens;
  shape.without_trees = p.tree_lens != nullptr ? 0 : -1;
  shape.batch = p.batch;
  shape.num_tokens = p.num_tokens;
  shape.max_seq_len = max_seq_len_of(p);
  shape.window = static_cast<int32_t>(p.window > 0 ? min_of<int64_t>(p.window, INT32_MAX) : INT32_MAX);
  shape.num_kv_heads = p.num_kv_heads;
  shape.group_size = p.group_size;
  shape.by_group_size = SmallDivisor(p.group_size);
  shape.m_tile = m_tile;
  shape.segment = static_cast<int32_t>(p.segment / kKvTile);
  shape.by_segment = SmallDivisor(shape.segment);
  shape.list = list;
  if (list == WorkList::kSmall) shape.more_rows = kSmallRows;
  if (list == WorkList::kLarge) shape.least_rows = kSmallRows + 1;
  return shape;
}

struct KvTiles {
  int32_t begin, end;
};

// No row tiles if the sequence is in another list.
struct SequenceWork {
  NodeRange tokens;
  int32_t seq_len;
  int32_t tree_len;    // negative: causal queries
  uint32_t rows;       // per head: fewer than 2^31, since a row of Q and of the output has at least 256 bytes
  uint32_t tile_rows;  // per row tile
  int32_t m_tiles;
  int32_t full_tile;   // M tile from which on all see about equally many keys
  int32_t tile_heads;  // KV heads per row tile; the last may have fewer
  int32_t head_tiles;  // row tiles per M tile
  int32_t row_tiles;
  int32_t kv_tiles;

  // Return the KV tile of a row's first visible key, and the one after its last.
  PT_HOST_DEVICE int32_t first_visible_tile(const WorkShape& shape, uint32_t row) const {
    const int32_t end = max_of(min_of(end_of(shape, row), tree_len < 0 ? seq_len : seq_len - tree_len), 0);
    return min_of(static_cast<int32_t>(static_cast<uint32_t>(max_of(end - shape.window, 0)) / kKvTile), kv_tiles - 1);
  }
  PT_HOST_DEVICE int32_t end_visible_tile(const WorkShape& shape, uint32_t row) const {
    return kv_tiles_of(max_of(end_of(shape, row), tree_len < 0 ? 0 : seq_len));
  }
  PT_HOST_DEVICE bool has_segments(const WorkShape& shape) const {
    return shape.segment > 0 && kv_tiles > shape.segment;
  }
  // Returns the first segment in `of` in which rows first..last may see keys; empty if none. Without segments returns
  // `of`. Calls know tree_len exactly, plans do not.
  PT_HOST_DEVICE KvTiles first_segment(const WorkShape& shape, uint32_t first, uint32_t last, KvTiles of) const {
    if (!has_segments(shape)) return of;
    of.begin = max_of(of.begin, shape.segment_begin(first_visible_tile(shape, first)));
    of.end = min_of(min_of(of.end, end_visible_tile(shape, last)), of.begin + shape.segment);
    return of;
  }

 private:
  // Returns the end of a causal row's keys, possibly negative.
  PT_HOST_DEVICE int32_t end_of(const WorkShape& shape, uint32_t row) const {
    const auto count = static_cast<int32_t>(tokens.size());
    return seq_len - count + min_of(static_cast<int32_t>(shape.by_group_size.quotient(row)) + 1, count);
  }
};

// Sharers of a row tile as a divisor, like SmallDivisor.
struct Sharers {
  int32_t count;
  PT_HOST_DEVICE uint32_t quotient(uint32_t value) const {
    return count > 1 ? value / static_cast<uint32_t>(count) : value;
  }
};

template <typename Divisor>
PT_HOST_DEVICE int32_t m_tiles_of(const WorkShape& shape, uint32_t rows, int32_t sharers, const Divisor& by_sharers) {
  const uint32_t alone = (rows + static_cast<uint32_t>(shape.m_tile) - 1) >> shape.m_tile_bits();
  return static_cast<int32_t>(by_sharers.quotient(alone + static_cast<uint32_t>(sharers) - 1));
}

template <typename Divisor>
PT_HOST_DEVICE SequenceWork sequence_work(const WorkShape& shape, int32_t b, const NodeRange& tokens, int32_t sharers,
                                          const Divisor& by_sharers) {
  SequenceWork work;
  work.tokens = tokens;
  work.tile_rows = static_cast<uint32_t>(shape.m_tile * sharers);
  work.seq_len = clamp_to(shape.seq_lens[b], 0, static_cast<int32_t>(shape.max_seq_len));
  work.tree_len = min_of(shape.tree_lens[b], work.seq_len) | shape.without_trees;
  const auto count = static_cast<int32_t>(tokens.size());
  work.rows = static_cast<uint32_t>(min_of<int64_t>(int64_t{count} * shape.group_size, INT32_MAX));
  const bool has_few_rows = shape.few_rows_heads > 1 && work.rows <= static_cast<uint32_t>(shape.few_rows);
  work.head_tiles = has_few_rows ? ceil_div(shape.num_kv_heads, shape.few_rows_heads) : shape.num_kv_heads;
  work.tile_heads = has_few_rows ? ceil_div(shape.num_kv_heads, work.head_tiles) : 1;
  work.m_tiles = shape.takes(work.rows) ? m_tiles_of(shape, work.rows, sharers, by_sharers) : 0;
  // Tokens before the window is full.
  const auto filling = static_cast<uint32_t>(clamp_to(shape.window - max_of(work.seq_len - count, 0), 0, count));
  const int32_t full_tile = m_tiles_of(shape, filling * static_cast<uint32_t>(shape.group_size), sharers, by_sharers);
  work.full_tile = work.tree_len < 0 ? min_of(full_tile, work.m_tiles - 1) : 0;
  work.row_tiles = static_cast<int32_t>(min_of<int64_t>(int64_t{work.m_tiles} * work.head_tiles, INT32_MAX - 1));
  work.kv_tiles = kv_tiles_of(work.seq_len);
  return work;
}
PT_HOST_DEVICE SequenceWork sequence_work(const WorkShape& shape, int32_t b, int32_t sharers = 1) {
  return sequence_work(shape, b, node_range(shape.cu_seqlens_q, shape.batch, b, shape.num_tokens), sharers,
                       Sharers{sharers});
}

struct WorkPosition {
  int32_t sequence;
  int32_t row_tile;
  int32_t kv_tile;

  bool operator==(const WorkPosition&) const = default;
  PT_HOST_DEVICE bool before(const WorkPosition& other) const {
    if (sequence != other.sequence) return sequence < other.sequence;
    if (row_tile != other.row_tile) return row_tile < other.row_tile;
    return kv_tile < other.kv_tile;
  }
  // Returns the start of the next row tile, or of the next sequence.
  PT_HOST_DEVICE WorkPosition next(int32_t row_tiles) const {
    const bool is_last = row_tile >= row_tiles - 1;
    return {sequence + is_last, is_last ? 0 : row_tile + 1, 0};
  }
  PT_HOST_DEVICE bool same_row(const WorkPosition& other) const {
    return ((sequence ^ other.sequence) | (row_tile ^ other.row_tile)) == 0;
  }
};

template <typename Int>
PT_HOST_DEVICE Int* ranges_of_list(Int* plan, WorkList list) {
  return plan + static_cast<int32_t>(list) * kListSize;
}

PT_HOST_DEVICE void set_range_start(int32_t* ranges, int32_t i, const WorkPosition& start) {
  int32_t* entry = ranges + kPlanEntry * (i + 1);
  entry[0] = start.sequence;
  entry[1] = start.row_tile;
  entry[2] = start.kv_tile;
}

PT_HOST_DEVICE int32_t planned_sharers(const int32_t* ranges, int32_t max_ctas) {
  return clamp_to<int32_t>(ranges[1], 1, min_of(kMostSharers, max_ctas));
}

PT_HOST_DEVICE int32_t planned_ranges(const int32_t* ranges, int32_t max_ranges) {
  return clamp_to<int32_t>(ranges[0], 1, max_ranges);
}

PT_HOST_DEVICE WorkPosition planned_start(const int32_t* ranges, int32_t i) {
  const int32_t* entry = ranges + kPlanEntry * (i + 1);
  return {max_of(entry[0], 0), max_of(entry[1], 0), max_of(entry[2], 0)};
}

// Returns the start of range i, inside the work for any plan; the end of the work for i == planned_ranges(). If the
// plan's starts do not ascend, callers use the running maximum.
PT_HOST_DEVICE WorkPosition range_start(const WorkShape& shape, const int32_t* ranges, int32_t num_ranges, int32_t i,
                                        int32_t sharers = 1) {
  if (i == 0) return {0, 0, 0};
  const WorkPosition end = {static_cast<int32_t>(shape.batch), 0, 0};
  if (i >= num_ranges) return end;
  WorkPosition start = planned_start(ranges, i);
  if (start.sequence >= shape.batch) return end;
  start.kv_tile = shape.segment_begin(start.kv_tile);
  const SequenceWork work = sequence_work(shape, start.sequence, sharers);
  return start.row_tile < work.row_tiles && start.kv_tile < work.kv_tiles ? start : start.next(work.row_tiles);
}

}  // namespace pagedtree
