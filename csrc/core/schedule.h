// How attention work is ordered and cut, the same for every backend.
//
// The linear order is (sequence, row tile, KV tile). A row tile is one M tile of one KV head: `m_tile` consecutive rows
// r = token * group_size + query head of the group. Where a head has few rows, a backend may put several KV heads into
// one row tile: their keys lie side by side, and memory is read in its own order. The order is cut into ranges of equal
// cost. A row tile that a cut crosses is computed in pieces, which are merged afterwards. So a range leaves at most two
// partial results, its first piece and its last, and the number of ranges bounds the scratch, whatever the batch and
// the lengths.
//
// A batch is one list of sequences, or two: sequences with few rows in small tiles, the others in large tiles.
//
// A plan holds nothing but the starts of the ranges of each list. Each range ends where the next one begins, the first
// begins at the origin and the last ends at the end. So every plan, even a stale one, covers all work exactly once; it
// can only be badly balanced.
#pragma once

#include "core/attention.h"
#include "core/tree.h"

namespace pagedtree {

constexpr int kKvTile = 64;           // keys of a KV tile, anchored at multiples of it
constexpr int kMaxPlanRanges = 1024;  // the most of any backend
constexpr int kPlanEntry = 4;         // int32 words: sequence, row tile, KV tile, unused; entry 0 is {number of ranges}
constexpr int kListSize = kPlanEntry * (kMaxPlanRanges + 1);

// Which sequences: all, those with at most kSmallRows rows per KV head, the others. A plan has room for each list.
enum class WorkList : int32_t { kAll, kSmall, kLarge };
constexpr WorkList kWorkLists[] = {WorkList::kAll, WorkList::kSmall, WorkList::kLarge};
constexpr int64_t kSmallRows = 32;
constexpr int kPlanSize = 3 * kListSize;

constexpr int kPieceCost = 2;  // the cost of starting and storing a piece, in KV tiles

// A row tile without keys still has one KV tile, because its output must be written.
PT_HOST_DEVICE int32_t kv_tiles_of(int64_t seq_len) {
  return static_cast<int32_t>(max_of<int64_t>(ceil_div<int64_t>(seq_len, kKvTile), 1));
}

struct WorkShape {
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  int64_t batch;
  int64_t num_tokens;   // T, padding included
  int64_t max_seq_len;  // seq_lens are clamped to it
  int32_t num_kv_heads;
  int32_t group_size;  // query heads per KV head
  int32_t m_tile;
  int32_t few_rows = 0;        // if a head has at most this many rows,
  int32_t few_rows_heads = 1;  // up to this many KV heads share a row tile
  WorkList list = WorkList::kAll;

  PT_HOST_DEVICE bool takes(int64_t rows) const {
    return list == WorkList::kAll || (rows <= kSmallRows) == (list == WorkList::kSmall);
  }
};

PT_HOST_DEVICE int64_t max_seq_len_of(const AttentionPlanParams& p) { return p.max_seq_len; }
PT_HOST_DEVICE int64_t max_seq_len_of(const TreeAttentionParams& p) {
  return min_of<int64_t>(p.table.max_pages * p.table.page_size, INT32_MAX);
}

// The work of one call, or of all calls that share a plan.
template <typename Params>
PT_HOST_DEVICE WorkShape work_shape(const Params& p, int32_t m_tile, WorkList list = WorkList::kAll) {
  WorkShape shape{};
  shape.seq_lens = p.seq_lens;
  shape.cu_seqlens_q = p.cu_seqlens_q;
  shape.batch = p.batch;
  shape.num_tokens = p.num_tokens;
  shape.max_seq_len = max_seq_len_of(p);
  shape.num_kv_heads = p.num_kv_heads;
  shape.group_size = p.group_size;
  shape.m_tile = m_tile;
  shape.list = list;
  return shape;
}

// The work of one sequence; no row tiles if the sequence belongs to another list.
struct SequenceWork {
  NodeRange tokens;
  int64_t seq_len;
  int32_t m_tiles;
  int32_t tile_heads;  // KV heads of a row tile; the last one may have fewer
  int32_t row_tiles;
  int32_t kv_tiles;

  PT_HOST_DEVICE int64_t row_cost() const { return int64_t{tile_heads} * (kv_tiles + kPieceCost); }
  // Bounded, so that no sum over a batch of bad lengths overflows.
  PT_HOST_DEVICE int64_t cost() const { return min_of<int64_t>(row_tiles * row_cost(), int64_t{1} << 40); }
};

PT_HOST_DEVICE SequenceWork sequence_work(const WorkShape& shape, int64_t b) {
  SequenceWork work;
  work.tokens = node_range(shape.cu_seqlens_q, shape.batch, b, shape.num_tokens);
  work.seq_len = clamp_to<int64_t>(shape.seq_lens[b], 0, shape.max_seq_len);
  const int64_t rows = work.tokens.size() * shape.group_size;
  const int32_t head_tiles = ceil_div(shape.num_kv_heads, rows <= shape.few_rows ? shape.few_rows_heads : 1);
  work.tile_heads = ceil_div(shape.num_kv_heads, max_of(head_tiles, 1));
  work.m_tiles = shape.takes(rows) ? static_cast<int32_t>(ceil_div<int64_t>(rows, shape.m_tile)) : 0;
  work.row_tiles = static_cast<int32_t>(min_of<int64_t>(int64_t{work.m_tiles} * head_tiles, (int64_t{1} << 31) - 2));
  work.kv_tiles = kv_tiles_of(work.seq_len);
  return work;
}

struct WorkPosition {
  int32_t sequence;
  int32_t row_tile;
  int32_t kv_tile;

  PT_HOST_DEVICE bool before(const WorkPosition& other) const {
    if (sequence != other.sequence) return sequence < other.sequence;
    if (row_tile != other.row_tile) return row_tile < other.row_tile;
    return kv_tile < other.kv_tile;
  }
  PT_HOST_DEVICE bool same_row(const WorkPosition& other) const {
    return sequence == other.sequence && row_tile == other.row_tile;
  }
};

// The place in a sequence's work, about `cost` from its start, where a range may begin. No cut leaves a piece of less
// than `min_piece` KV tiles.
PT_HOST_DEVICE WorkPosition cut_position(const SequenceWork& work, int32_t sequence, int64_t cost, int32_t min_piece) {
  const int64_t row = cost / work.row_cost();
  const int64_t tile = max_of<int64_t>(cost % work.row_cost() / work.tile_heads - kPieceCost, 0);
  if (tile < min_piece) return {sequence, static_cast<int32_t>(row), 0};
  if (work.kv_tiles - tile < min_piece) return {sequence, static_cast<int32_t>(row + 1), 0};
  return {sequence, static_cast<int32_t>(row), static_cast<int32_t>(tile)};
}

// How many ranges a backend wants.
struct RangeLimits {
  int32_t most;
  int32_t multiple;  // a number of ranges above this is a multiple of it
  int64_t min_cost;  // of a range
  int32_t min_piece;
};

PT_HOST_DEVICE int32_t num_ranges_of(int64_t total_cost, const RangeLimits& limits) {
  const int32_t count = static_cast<int32_t>(clamp_to<int64_t>(total_cost / limits.min_cost, 1, limits.most));
  return count < limits.multiple ? count : count - count % limits.multiple;
}

// The cost before range i: total_cost * i / num_ranges, without overflow.
PT_HOST_DEVICE int64_t range_target(int64_t total_cost, int32_t num_ranges, int32_t i) {
  return total_cost / num_ranges * i + total_cost % num_ranges * i / num_ranges;
}

// A list's part of a plan, [kListSize].
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

// Cuts the work into ranges and writes them [kListSize].
PT_HOST_DEVICE void make_ranges(const WorkShape& shape, const RangeLimits& limits, int32_t* ranges) {
  int64_t total = 0;
  for (int64_t b = 0; b < shape.batch; ++b) total += sequence_work(shape, b).cost();
  const int32_t num_ranges = num_ranges_of(total, limits);
  for (int32_t i = 0; i < kListSize; ++i) ranges[i] = 0;
  ranges[0] = num_ranges;
  int32_t range = 0;
  int64_t before = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    const SequenceWork work = sequence_work(shape, b);
    const int64_t after = before + work.cost();
    for (; range < num_ranges; ++range) {
      const int64_t target = range_target(total, num_ranges, range);
      if (target >= after) break;
      set_range_start(ranges, range, cut_position(work, static_cast<int32_t>(b), target - before, limits.min_piece));
    }
    before = after;
  }
}

// How many ranges the shapes alone allow; reads no tensor. It keeps the scratch of small calls small.
PT_HOST_DEVICE int32_t range_bound(const WorkShape& shape, const RangeLimits& limits) {
  // Rounded up to full row tiles: if several heads share one, all row tiles count as equally large.
  const int32_t head_tiles = max_of(ceil_div(shape.num_kv_heads, shape.few_rows_heads), 1);
  const int64_t heads = head_tiles * ceil_div(shape.num_kv_heads, head_tiles);
  const int64_t row_tiles =
      heads * (shape.batch + ceil_div<int64_t>(shape.num_tokens * shape.group_size, shape.m_tile));
  const int64_t row_cost = ceil_div<int64_t>(shape.max_seq_len, kKvTile) + 1 + kPieceCost;
  const int64_t enough = limits.most * limits.min_cost;
  const int64_t bound = row_tiles >= enough ? limits.most : row_tiles * row_cost / limits.min_cost;
  return static_cast<int32_t>(clamp_to<int64_t>(bound, 1, limits.most));
}

PT_HOST_DEVICE int32_t planned_ranges(const int32_t* ranges, int32_t max_ranges) {
  return clamp_to<int32_t>(ranges[0], 1, max_ranges);
}

// What a plan says of the start of range i > 0.
PT_HOST_DEVICE WorkPosition planned_start(const int32_t* ranges, int32_t i) {
  const int32_t* entry = ranges + kPlanEntry * (i + 1);
  return {max_of(entry[0], 0), max_of(entry[1], 0), max_of(entry[2], 0)};
}

// The start of range i < planned_ranges(), a position inside the work whatever the plan says; i == planned_ranges() is
// the end. Starts never decrease if those of planned_start() do not; for other plans callers take the running maximum.
PT_HOST_DEVICE WorkPosition range_start(const WorkShape& shape, const int32_t* ranges, int32_t num_ranges, int32_t i) {
  if (i == 0) return {0, 0, 0};
  const WorkPosition end = {static_cast<int32_t>(shape.batch), 0, 0};
  if (i >= num_ranges) return end;
  const WorkPosition start = planned_start(ranges, i);
  if (start.sequence >= shape.batch) return end;
  const SequenceWork work = sequence_work(shape, start.sequence);
  if (start.row_tile >= work.row_tiles) return {start.sequence + 1, 0, 0};
  if (start.kv_tile < work.kv_tiles) return start;
  if (start.row_tile + 1 < work.row_tiles) return {start.sequence, start.row_tile + 1, 0};
  return {start.sequence + 1, 0, 0};
}

}  // namespace pagedtree
