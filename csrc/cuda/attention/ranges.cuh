// Iterates over the work tiles of a CTA's kv range.
#pragma once

#include <cstddef>

#include "cuda/attention/call.h"

namespace pagedtree::cuda {

// Plan entry: a range's start and first work tile, instead of a search through lengths. In the order of a
// RangeIterator.
struct alignas(16) RangeRecord {
  WorkPosition begin;
  int32_t kv_end;
  uint32_t kind;  // of row tiles, see kind_of(); 0: no work tile, or another start
  int32_t kv_head;
  uint32_t first_row;  // of the row tile
  int32_t first_token;
  int32_t num_kv_heads;  // of the planned call
  int32_t num_queries, seq_len;
  int32_t has_more;       // flag: other row tiles may follow
  int32_t number, count;  // position among the row tile's partial results
  int32_t tickets[2];

  PT_HOST_DEVICE static uint32_t kind_of(const WorkShape& shape, int32_t m_tile, int32_t sharers) {
    return static_cast<uint32_t>(shape.group_size) << 13 | static_cast<uint32_t>(m_tile << 4 | sharers);
  }
};
static_assert(sizeof(RangeRecord) == kPlanEntry * sizeof(int32_t));

// A work tile: KV tiles [at.kv_tile, kv_end) of a row tile and the CTA's rows; no rows at the end of the range.
struct RowPiece {
  WorkPosition at;
  int32_t kv_end;
  RowTile tile;

  __device__ __forceinline__ bool is_whole() const { return at.kv_tile == 0 && kv_end == tile.kv_tiles(); }
};

// Iterator over a CTA's range, updated by one thread.
struct RangeIterator : RowPiece {
  PieceOrder order;  // of the record's work tile; count 0 for others
  int32_t has_more;  // flag: other row tiles may follow
  Share share;
  WorkPosition stop;  // unknown for the record
  bool is_cut[2];     // row tiles split at the range's beginning and end
  bool is_last[2];    // the CTA arrived last at that tile
  uint16_t part[2];   // of that tile, claimed by the CTA

  __device__ __forceinline__ bool is_planned() const { return order.count > 0; }
  // True in a second pass, query by query (see join()): order.count is negative.
  __device__ __forceinline__ bool is_by_query() const { return order.count < 0; }

  // Called by a warp. Starts from the CTA's record if it matches the lengths; otherwise the sequence's records are void
  // and is_planned() is false. Any plan yields rows and pages of the call only. kShares: several CTAs per range.
  template <bool kShares>
  __device__ __forceinline__ void begin(const AttentionParams& p, const CallShape& call, int32_t m_tile) {
    const WorkShape& shape = call.work;
    const int32_t* const plan = call.pieces.plan;
    const int32_t capacity = call.pieces.capacity, cta = static_cast<int32_t>(blockIdx.x);
    const uint32_t lane = ptx::thread_index() % 32;
    const bool is_aligned = reinterpret_cast<uintptr_t>(plan) % alignof(RangeRecord) == 0;
    const auto* const records = reinterpret_cast<const RangeRecord*>(plan) + 1;
    RangeRecord record{};
    if (kShares && is_aligned) record = records[cta];  // before the number of sharers arrives
    const Share own = kShares ? Share::of(planned_sharers(plan, capacity), cta) : Share{1, cta, cta};
    if (lane == 0) {
      order.count = 0;
      if (kShares) has_more = 1;
      share = own;
      is_cut[0] = is_cut[1] = false;
    }
    if (!is_aligned) return;
    if (!kShares || own.sharers > 1) record = records[own.range];
    const auto below = [](int64_t n, int64_t end) { return static_cast<uint32_t>(n) < static_cast<uint32_t>(end); };
    const uint32_t rows = static_cast<uint32_t>(record.num_queries) * static_cast<uint32_t>(p.group_size),
                   first_row = record.first_row + static_cast<uint32_t>(own.part() * m_tile),
                   left = static_cast<uint32_t>(record.count) - static_cast<uint32_t>(record.number);
    const auto b = static_cast<uint32_t>(record.begin.sequence);
    // Without short circuits: a branch would delay the remaining loads.
    const bool is_sound = (shape.segment == 0) & (kShares || plan[1] <= 1) &
                          (record.kind == RangeRecord::kind_of(shape, m_tile, own.sharers)) &
                          (record.num_kv_heads == p.num_kv_heads) & below(b, p.batch) &
                          below(record.kv_head, p.num_kv_heads) & below(record.begin.row_tile, INT32_MAX) &
                          below(first_row, rows) & below(record.begin.kv_tile, record.kv_end) &
                          !below(kv_tiles_of(INT32_MAX), record.kv_end) & !below(own.range, record.number) &
                          below(record.number, record.count) &
                          !below(capacity - own.range * own.sharers, left * static_cast<uint32_t>(own.sharers));
    if (!is_sound) return;
    const int32_t first = cta - record.number * own.sharers;
    // Each lane reads one offset, see rows_of_search(). All loads precede their first use.
    const uint32_t bit = 1u << lane, offset = (b & (0u - bit)) | bit;
    const auto tokens = static_cast<int32_t>(shape.num_tokens);
    const int32_t tree_len = tree_length(p, b, record.num_queries, INT32_MAX);
    const int32_t seq_len = clamp_to(shape.seq_lens[b], 0, static_cast<int32_t>(shape.max_seq_len));
    int32_t begin = b == 0 ? shape.cu_seqlens_q[0] : 0, end = tokens;
    if (offset <= static_cast<uint32_t>(shape.batch)) end = shape.cu_seqlens_q[offset];
    begin = min_of(__reduce_max_sync(kWholeWarp, max_of((b & bit) != 0 ? end : begin, 0)), tokens);
    end = max_of(__reduce_min_sync(kWholeWarp, (b & bit) != 0 ? tokens : end), begin);
    const bool is_current =
        (begin == record.first_token) & (end - begin == record.num_queries) & (seq_len == record.seq_len);
    if (!is_current || lane != 0) return;
    at = record.begin;
    kv_end = record.kv_end;
    tile = {{min_of(rows - first_row, static_cast<uint32_t>(m_tile)), record.kv_head, first_row, record.first_token},
            record.begin.sequence,
            record.num_queries,
            record.seq_len,
            min_of(tree_len, seq_len)};
    order = {first, record.number, record.count};
    has_more = record.has_more;
  }

  // Returns a range's planned start: within its sequence's KV tiles, maybe past its row tiles, which advance() skips.
  __device__ __forceinline__ WorkPosition start_of(const AttentionParams& p, int32_t range,
                                                   const CallShape& call) const {
    const WorkShape& shape = call.work;
    const int32_t* planned = ranges_of_list(p.plan, shape.list);
    const int32_t count = planned_ranges(planned, call.pieces.capacity / share.sharers);
    WorkPosition start = range == 0 ? WorkPosition{} : planned_start(planned, range);
    if (range >= count || start.sequence >= shape.batch) start = {static_cast<int32_t>(shape.batch), 0, 0};
    start.kv_tile = shape.segment_begin(start.kv_tile);
    if (start.kv_tile > 0) {
      const auto most = static_cast<int32_t>(shape.max_seq_len);
      const bool is_inside = start.kv_tile < kv_tiles_of(min_of(shape.seq_lens[start.sequence], most));
      if (!is_inside) start = {start.sequence, start.row_tile + (start.row_tile < INT32_MAX), 0};
    }
    return start;
  }
  __device__ __forceinline__ void find(const AttentionParams& p, const CallShape& call, int32_t first) {
#pragma unroll 1
    for (int32_t i = first; i < 2; ++i) (i == 0 ? at : stop) = start_of(p, share.range + i, call);
  }

  // Moves to the next query's rows; order.count is -1 before the first. Returns false after the last.
  __device__ __forceinline__ bool next_query(const AttentionParams& p, uint32_t m_tile) {
    const bool is_first = order.count-- == -1;
    if (!is_first) tile.first_row += tile.rows;
    const uint32_t in_tile = tile.first_row % m_tile, all = static_cast<uint32_t>(tile.num_queries * p.group_size);
    tile.rows = min_of(m_tile - in_tile, all - tile.first_row);
    tile.rows = tile.rows_of_query(p, 0).end;
    return (is_first || in_tile > 0) && tile.first_row < all;
  }

  // Moves to the head's next row tile, with known sequence and keys. Returns false if the range has no rows there.
  __device__ __forceinline__ bool next_in_head(const AttentionParams& p, int32_t m_tile) {
    const uint32_t rows = static_cast<uint32_t>(tile.num_queries * p.group_size),
                   first_row = tile.first_row + static_cast<uint32_t>(m_tile * share.sharers);
    const WorkPosition next{at.sequence, at.row_tile + 1, 0};
    if (first_row >= rows || !next.before(stop)) return false;
    at = next;
    kv_end = next.same_row(stop) ? stop.kv_tile : tile.kv_tiles();
    tile.first_row = first_row;
    tile.rows = min_of(rows - first_row, static_cast<uint32_t>(m_tile));
    return true;
  }

  // Moves to the next row tile or segment with rows for the CTA: from the range's beginning, or after the current one.
  __device__ __forceinline__ void advance(const AttentionParams& p, const CallShape& call, const WorkShape& shape,
                                          bool is_behind) {
    if (order.count != 0 || !is_behind) find(p, call, is_behind);
    const bool is_whole_tile = is_behind && !is_by_query();
    order.count = 0;
    if (is_whole_tile && shape.segment == 0 && next_in_head(p, shape.m_tile)) return;
    tile.rows = 0;
    for (WorkPosition now = at; now.before(stop); is_behind = false) {
      SequenceWork work = sequence_work(shape, now.sequence, share.sharers);
      if ((!is_behind || shape.segment > 0) && now.row_tile < work.row_tiles) {
        tile = row_tile(p, work, now.sequence, now.row_tile, shape.m_tile, share.part());
        work.tree_len = tile.tree_len;
        const KvTiles tiles =
            work.first_segment(shape, tile.first_row, tile.first_row + tile.rows - 1,
                               {is_behind ? kv_end : now.kv_tile, now.same_row(stop) ? stop.kv_tile : work.kv_tiles});
        at = {now.sequence, now.row_tile, tiles.begin};
        kv_end = tiles.end;
        if (tiles.begin >= tiles.end) tile.rows = 0;
        if (tile.rows > 0) return;
      }
      now = now.next(work.row_tiles);  // skips sequences without row tiles
    }
  }
};

// Returns the position of the CTA's partial result: from the next range's record if that matches, else by a slow scan
// over the ranges. Empty ranges have none.
__device__ __forceinline__ PieceOrder order_of(const RangeIterator& walk, const Pieces& pieces) {
  const WorkPosition& at = walk.at;
  const RowTile& tile = walk.tile;
  const auto [sharers, cta, own] = walk.share;
  const int32_t ranges = planned_ranges(pieces.plan, pieces.capacity / sharers), kv_tiles = tile.kv_tiles();
  if (own + 1 < ranges && at.kv_tile == 0 && planned_start(pieces.plan, own + 1).same_row(at)) {
    const int32_t* next = pieces.plan + kPlanEntry * (own + 2);  // a record, maybe unaligned
    const auto word = [&](size_t offset) { return next[offset / sizeof(int32_t)]; };
    if (word(offsetof(RangeRecord, first_token)) == tile.first_token &&
        word(offsetof(RangeRecord, num_queries)) == tile.num_queries &&
        word(offsetof(RangeRecord, seq_len)) == tile.seq_len && word(offsetof(RangeRecord, number)) == 1 &&
        word(offsetof(RangeRecord, kind)) != 0 &&
        static_cast<uint32_t>(word(offsetof(RangeRecord, count)) - 2) < static_cast<uint32_t>(ranges - own - 1)) {
      return {cta, 0, word(offsetof(RangeRecord, count))};
    }
  }
  const auto begin_of = [&](int32_t range) {  // inside the row tile
    if (range >= ranges) return kv_tiles;
    const WorkPosition begin = range == 0 ? WorkPosition{} : planned_start(pieces.plan, range);
    if (begin.same_row(at)) return min_of(begin.kv_tile, kv_tiles);
    return begin.before(at) ? 0 : kv_tiles;
  };
  PieceOrder order{own, 0, 1};
  for (int32_t end = begin_of(own); end > 0;) {
    const int32_t begin = begin_of(--order.first);
    order.number += begin < end;
    end = begin;
  }
  for (int32_t range = own + 1, begin = begin_of(range); begin < kv_tiles;) {
    const int32_t end = begin_of(++range);
    order.count += begin < end;
    begin = end;
  }
  return {order.first * sharers + walk.share.part(), order.number, order.number + order.count};
}

template <typename I>
__device__ __forceinline__ Piece place_of(const AttentionParams& p, const CallShape& call, const Share& share,
                                          const RowPiece& piece) {
  const Pieces pieces = pieces_of<I>(call);
  if (call.work.segment > 0) return pieces.of_segment(p, call.work, piece.tile, piece.at.kv_tile);
  return pieces.of(share, piece.at.kv_tile == 0);
}

// Records that the CTA splits the row tile. Segments are merged by a separate kernel.
__device__ __forceinline__ void record_cut(RangeIterator& walk, const Pieces& pieces) {
  if (walk.is_by_query() || pieces.segment_rows > 0) return;
  const bool is_first = walk.at.kv_tile == 0;
  walk.is_cut[is_first] = true;
  pieces.cuts(walk.share.cta)[is_first] = {walk.tile, walk.is_planned() ? walk.order : order_of(walk, pieces)};
}

}  // namespace pagedtree::cuda
