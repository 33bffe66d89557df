// How attention work is ordered and cut, the same for every backend.
//
// The linear order is (sequence, row tile, KV tile). A row tile is one M tile of one KV head: `m_tile` consecutive rows
// r = token * group_size + query head of the group. Where a head has few rows, a backend may put several KV heads into
// one row tile: their keys lie side by side, and memory is read in its own order. The order is cut into ranges of equal
// cost: that of the KV tiles with a key that some row of the tile sees. A row tile that a cut crosses is computed in
// pieces, which are merged afterwards. So a range leaves at most two partial results, its first piece and its last, and
// the number of ranges bounds the scratch, whatever the batch and the lengths.
//
// Row tiles of one head read the same keys. Where these are too many for a cache, a row tile may be that of several
// CTAs: each takes m_tile rows of it, and all go through the same ranges, so that they read the same keys at the same
// time, and memory gives them once.
//
// A batch is one list of sequences, or two: sequences with few rows in small tiles, the others in large tiles.
//
// A plan holds the starts of the ranges of each list, and how many share them. Each range ends where the next one
// begins, the first begins at the origin and the last ends at the end. So every plan in order, even a stale one, covers
// all work exactly once; it can only be badly balanced. What else a plan for CUDA holds counts for the lengths it was
// made for.
#pragma once

#include "core/attention.h"
#include "core/divisor.h"
#include "core/tree.h"

namespace pagedtree {

constexpr int kKvTile = 64;           // keys of a KV tile, anchored at multiples of it
constexpr int kMaxPlanRanges = 1024;  // the most of any backend
constexpr int kMostSharers = 8;       // CTAs that share a row tile
constexpr int kPlanEntry = 16;  // int32 words: sequence, row tile, KV tile, ...; entry 0 is {ranges, sharers of each}
constexpr int kListSize = kPlanEntry * (kMaxPlanRanges + 1);

// Which sequences: all, those with at most kSmallRows rows per KV head, the others. A plan has room for each list.
enum class WorkList : int32_t { kAll, kSmall, kLarge };
constexpr WorkList kWorkLists[] = {WorkList::kAll, WorkList::kSmall, WorkList::kLarge};
constexpr int64_t kSmallRows = 32;
constexpr int kPlanSize = 3 * kListSize;

constexpr int kPieceCost = 1;  // the cost of one more piece in a range, in KV tiles

// A row tile without keys still has one KV tile, because its output must be written.
PT_HOST_DEVICE int32_t kv_tiles_of(int32_t seq_len) {
  return static_cast<int32_t>(static_cast<uint32_t>(max_of(seq_len, 1) - 1) / kKvTile + 1);
}

struct WorkShape {
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* tree_lens;     // [B] or null: queries count as causal, which trees of a few KV tiles nearly are
  int64_t batch;
  int64_t num_tokens;   // T, padding included
  int64_t max_seq_len;  // seq_lens are clamped to it
  int64_t window;       // 0: none
  int32_t num_kv_heads;
  int32_t group_size;  // query heads per KV head
  SmallDivisor by_group_size;
  int32_t m_tile;
  int32_t few_rows = 0;        // if a head has at most this many rows,
  int32_t few_rows_heads = 1;  // up to this many KV heads share a row tile
  WorkList list = WorkList::kAll;

  PT_HOST_DEVICE int m_tile_bits() const { return popcount32(static_cast<uint32_t>(m_tile) - 1); }  // a power of two
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
  shape.tree_lens = p.tree_lens;
  shape.batch = p.batch;
  shape.num_tokens = p.num_tokens;
  shape.max_seq_len = max_seq_len_of(p);
  shape.window = p.window;
  shape.num_kv_heads = p.num_kv_heads;
  shape.group_size = p.group_size;
  shape.by_group_size = SmallDivisor(p.group_size);
  shape.m_tile = m_tile;
  shape.list = list;
  return shape;
}

// The KV tiles [first, end), at least one, because the output of a row tile without keys must be written, too.
struct TileSpan {
  int32_t first;
  int32_t end;

  PT_HOST_DEVICE int32_t size() const { return end - first; }
};

// The work of one sequence; no row tiles if the sequence belongs to another list.
struct SequenceWork {
  NodeRange tokens;
  int32_t seq_len;
  uint32_t rows;       // of a head: fewer than 2^31, as a row of Q and of the output has 256 bytes at least
  uint32_t tile_rows;  // of a row tile
  int32_t m_tiles;
  int32_t tile_heads;  // KV heads of a row tile; the last one may have fewer
  int32_t row_tiles;
  int32_t kv_tiles;
};

// A row tile has m_tile rows for each of the CTAs that share it.
PT_HOST_DEVICE SequenceWork sequence_work(const WorkShape& shape, int64_t b, int32_t sharers = 1) {
  SequenceWork work;
  work.tile_rows = static_cast<uint32_t>(shape.m_tile * sharers);
  work.tokens = node_range(shape.cu_seqlens_q, shape.batch, b, shape.num_tokens);
  work.seq_len = static_cast<int32_t>(clamp_to<int64_t>(shape.seq_lens[b], 0, shape.max_seq_len));
  work.rows = static_cast<uint32_t>(min_of<int64_t>(work.tokens.size() * shape.group_size, INT32_MAX));
  const auto rows = static_cast<int32_t>(work.rows);
  const bool has_few_rows = shape.few_rows_heads > 1 && rows <= shape.few_rows;
  const int32_t head_tiles = has_few_rows ? ceil_div(shape.num_kv_heads, shape.few_rows_heads) : shape.num_kv_heads;
  work.tile_heads = has_few_rows ? ceil_div(shape.num_kv_heads, head_tiles) : 1;
  const uint32_t m_tiles = (work.rows + static_cast<uint32_t>(shape.m_tile) - 1) >> shape.m_tile_bits();
  work.m_tiles = shape.takes(rows) ? static_cast<int32_t>(m_tiles) : 0;
  if (sharers > 1) work.m_tiles = (work.m_tiles - 1) / sharers + 1 - (work.m_tiles == 0);
  work.row_tiles = static_cast<int32_t>(min_of<int64_t>(int64_t{work.m_tiles} * head_tiles, INT32_MAX - 1));
  work.kv_tiles = kv_tiles_of(work.seq_len);
  return work;
}

// The KV tiles from the first with a key that row `from` of a head sees to the last with a key that row `to` sees.
PT_HOST_DEVICE TileSpan seen_tiles(const WorkShape& shape, const SequenceWork& work, int64_t b, uint32_t from,
                                   uint32_t to) {
  const int32_t tree_len = shape.tree_lens == nullptr ? -1 : min_of(shape.tree_lens[b], work.seq_len);
  int32_t lowest = 0, highest = work.seq_len;
  if (tree_len >= 0) {
    const int64_t seen = shape.window > 0 ? work.seq_len - tree_len - min_of(shape.window, kMaxWindow) : 0;
    lowest = static_cast<int32_t>(max_of<int64_t>(seen, 0));
  } else {
    const auto seen = [&](uint32_t row) {
      return causal_visibility(work.seq_len, work.tokens.size(), shape.by_group_size.quotient(row), shape.window);
    };
    lowest = seen(from).lowest();
    highest = seen(min_of(to, work.rows - 1)).highest();
  }
  const int32_t first = min_of(lowest / kKvTile, work.kv_tiles - 1);
  return {first, max_of(highest / kKvTile + (highest % kKvTile > 0), first + 1)};
}

// Those outside which none of the rows of M tile m sees a key; or, `common`, those inside which all CTAs that share it
// see keys.
PT_HOST_DEVICE TileSpan visible_tiles(const WorkShape& shape, const SequenceWork& work, int64_t b, int32_t m,
                                      bool common = false) {
  const uint32_t first = static_cast<uint32_t>(m) * work.tile_rows, end = first + work.tile_rows;
  if (!common) return seen_tiles(shape, work, b, first, end - 1);
  const uint32_t last = (min_of(end, work.rows) - 1) >> shape.m_tile_bits() << shape.m_tile_bits();
  return seen_tiles(shape, work, b, max_of(last, first), first + static_cast<uint32_t>(shape.m_tile) - 1);
}

// value / divisor, for a divisor above 0. Compilers have some hundred instructions of GPUs for each such division: this
// is one copy of few. Each step finds 19 bits of the quotient.
PT_SHARED_FUNCTION int64_t quotient(int64_t value, int64_t divisor) {
#if defined(__CUDA_ARCH__)
  const float inverse = __fdividef(0x1.fffffp-1f, static_cast<float>(divisor));
#else
  const float inverse = 0x1.fffffp-1f / static_cast<float>(divisor);
#endif
  int64_t left = value < 0 ? -value : value, found = 0;
  while (left >= divisor) {
    const int64_t step = max_of<int64_t>(static_cast<int64_t>(static_cast<float>(left) * inverse), 1);
    found += step;
    left -= step * divisor;
  }
  return value < 0 ? -found : found;
}

// value * numerator / denominator without overflow, for numerator <= denominator <= 2^32.
PT_HOST_DEVICE int64_t scaled(int64_t value, int64_t numerator, int64_t denominator) {
  const int64_t whole = quotient(value, denominator);
  return whole * numerator + quotient((value - whole * denominator) * numerator, denominator);
}

// The work of some sequences.
struct WorkSum {
  int64_t cost;
  int64_t row_tiles;
  int64_t different;  // KV tiles, each counted once for all row tiles of a head
  int64_t dearest;    // the cost of a row tile that no other exceeds
  int32_t m_tiles;    // the most of a head

  PT_HOST_DEVICE WorkSum operator+(const WorkSum& other) const {
    return {cost + other.cost, row_tiles + other.row_tiles, different + other.different, max_of(dearest, other.dearest),
            max_of(m_tiles, other.m_tiles)};
  }
};

// What the row tiles of a sequence cost. Of a causal sequence, each M tile sees more keys than the one before, until
// the window is full: their numbers of KV tiles lie on a line, up to rounding, and then stay.
struct RowCosts {
  int32_t tile_heads, m_tiles, row_tiles;
  int32_t first = 0, last = 0;  // KV tiles of the first and of the last M tile
  int32_t knee;                 // the M tile from which on all have as many as the last
  int64_t of_head;              // the cost of a head

  PT_HOST_DEVICE RowCosts(const WorkShape& shape, const SequenceWork& work, int64_t b)
      : tile_heads(work.tile_heads), m_tiles(work.m_tiles), row_tiles(work.row_tiles) {
    knee = max_of(m_tiles - 1, 0);
    PT_NO_UNROLL for (int32_t m = 0, end = 2; m < end; ++m) {
      first = last;
      last = visible_tiles(shape, work, b, m == 0 ? 0 : knee).size();
    }
    const int64_t prefix = work.seq_len - work.tokens.size();  // keys that the first query sees beside its own
    if (shape.window > 0) {
      const int64_t filling = clamp_to<int64_t>(shape.window - prefix, 0, work.tokens.size()) * shape.group_size;
      knee = min_of<int64_t>(knee, ceil_div(static_cast<uint32_t>(filling), work.tile_rows));
    }
    of_head = before(m_tiles);
  }

  // The cost of the first m M tiles of a head.
  PT_HOST_DEVICE int64_t before(int32_t m) const {
    const int32_t rising = min_of(m, knee);
    int64_t tiles = int64_t{rising} * first + int64_t{m - rising} * last;
    if (last != first)
      tiles += scaled(int64_t{last - first} * rising, rising - 1, max_of<int64_t>(2 * int64_t{knee}, 1));
    return tile_heads * (tiles + m * kPieceCost);
  }
  // Of the sequence; bounded, so that no sum over a batch of bad lengths overflows.
  PT_HOST_DEVICE WorkSum sum() const {
    const int64_t heads = m_tiles > 0 ? quotient(row_tiles, m_tiles) : 0;
    const int64_t of_row = int64_t{tile_heads} * (max_of(first, last) + kPieceCost);
    return {min_of<int64_t>(heads * of_head, int64_t{1} << 40), row_tiles, heads * last, m_tiles > 0 ? of_row : 0,
            m_tiles};
  }
  struct Tile {
    int32_t m;
    int64_t before;
  };
  // The last M tile of a head that begins at this cost or before, and what it begins at.
  PT_HOST_DEVICE Tile tile_at(int64_t cost) const {
    Tile found{};
    for (int32_t high = m_tiles; high - found.m > 1;) {
      const int32_t middle = found.m + (high - found.m) / 2;
      const int64_t of_middle = before(middle);
      if (of_middle <= cost) {
        found = {middle, of_middle};
      } else {
        high = middle;
      }
    }
    return found;
  }
};
struct WorkPosition {
  int32_t sequence;
  int32_t row_tile;
  int32_t kv_tile;

  PT_HOST_DEVICE bool before(const WorkPosition& other) const {
    if (sequence != other.sequence) return sequence < other.sequence;
    if (row_tile != other.row_tile) return row_tile < other.row_tile;
    return kv_tile < other.kv_tile;
  }
  // The next of so many row tiles of the sequence, or the next sequence.
  PT_HOST_DEVICE WorkPosition next(int32_t row_tiles) const {
    return row_tile < row_tiles - 1 ? WorkPosition{sequence, row_tile + 1, 0} : WorkPosition{sequence + 1, 0, 0};
  }
  PT_HOST_DEVICE bool same_row(const WorkPosition& other) const {
    return sequence == other.sequence && row_tile == other.row_tile;
  }
};

// How many ranges a backend wants.
struct RangeLimits {
  int32_t most;
  int32_t multiple;  // a number of ranges above this is a multiple of it
  int64_t min_cost;  // of a range
  int32_t min_piece;
  int64_t held_tiles;  // that a cache keeps: nobody shares the row tiles of a list with no more KV tiles than these
};

// How many CTAs should share the row tiles of a list: as many as leave the fewest without a row at the end of a head.
PT_HOST_DEVICE int32_t sharers_of(const WorkSum& alone, const RangeLimits& limits) {
  if (alone.different <= limits.held_tiles) return 1;
  int32_t best = 1, fewest = alone.m_tiles;
  PT_NO_UNROLL for (int32_t count = min_of(min_of(kMostSharers, limits.most), alone.m_tiles); count > 1; --count) {
    const int32_t without = ceil_div(alone.m_tiles, count) * count - alone.m_tiles;
    if (without < fewest) best = count, fewest = without;
  }
  return best;
}

// Whether sharing costs little. CTAs wait for others of their row tile that see more keys, or have rows at all.
PT_HOST_DEVICE bool can_share(const WorkSum& alone, const WorkSum& shared, int32_t sharers) {
  return shared.cost <= quotient(alone.cost + alone.cost / 32, sharers);
}

// How the work is cut: where row tiles are about as large, into equally many ranges of each, so that none crosses from
// one row tile to the next; otherwise into ranges of equal cost.
struct Cuts {
  int64_t total = 0;  // cost
  int32_t num_ranges = 0;
  int32_t each = 0;  // ranges of a row tile; 0: of equal cost

  Cuts() = default;
  PT_HOST_DEVICE Cuts(const WorkSum& work, const RangeLimits& limits, int32_t sharers) : total(work.cost) {
    const auto parts = [](int32_t value, int32_t divisor) { return static_cast<int32_t>(quotient(value, divisor)); };
    const auto wanted = static_cast<int32_t>(min_of<int64_t>(quotient(total, limits.min_cost), limits.most));
    int32_t ctas = clamp_to(wanted * sharers, 1, limits.most);
    if (ctas >= limits.multiple) ctas = parts(ctas, limits.multiple) * limits.multiple;
    num_ranges = max_of(parts(ctas, sharers), 1);
    if (work.row_tiles < 1 || work.row_tiles > num_ranges) return;
    const auto row_tiles = static_cast<int32_t>(work.row_tiles);
    int32_t even = parts(num_ranges + row_tiles / 2, row_tiles);
    if (even * row_tiles * sharers > limits.most) --even;
    // Ranges of equal cost have about one KV tile more than their mean, as cuts are rounded.
    if (work.dearest * num_ranges > (total + num_ranges) * even) return;
    each = even;
    num_ranges = even * row_tiles;
  }

  // What is counted up to a range's start: the ranges of row tiles, or cost.
  PT_HOST_DEVICE int64_t progress(const WorkSum& work) const { return each > 0 ? work.row_tiles * each : work.cost; }
  // That before range i. By cost, every range begins a piece; what row tiles cost beside their KV tiles is the further
  // pieces'. So the first range begins behind that of its row tile, and ranges that begin with a row tile are not
  // shorter.
  PT_HOST_DEVICE int64_t target(int32_t i) const {
    return each > 0 ? i : kPieceCost + scaled(total - kPieceCost, i, num_ranges);
  }
  // The start of a range, `offset` from the begin of the sequence's work. By cost, it is the nearest place that leaves
  // no piece of less than `min_piece` KV tiles with a key that is seen; a row tile with few is not cut.
  PT_HOST_DEVICE WorkPosition start(const WorkShape& shape, const SequenceWork& work, const RowCosts& costs,
                                    int32_t sequence, int64_t offset, int32_t min_piece) const {
    const int64_t of_head = each > 0 ? int64_t{work.m_tiles} * each : costs.of_head;
    const int64_t head = quotient(offset, of_head), rest = offset - head * of_head;
    RowCosts::Tile tile{};
    if (each > 0) {
      tile.m = static_cast<int32_t>(quotient(rest, each));
      tile.before = int64_t{tile.m} * each;
    } else {
      tile = costs.tile_at(rest);
    }
    const auto row = static_cast<int32_t>(head * work.m_tiles + tile.m);
    TileSpan seen{}, common{};
    PT_NO_UNROLL for (int32_t i = 0; i < 2; ++i) {
      seen = common;
      common = visible_tiles(shape, work, sequence, tile.m, i > 0);
    }
    const int32_t size = seen.size();
    int32_t wanted = 0, low = min_piece, high = min_piece;
    if (each > 0) {
      const auto piece = static_cast<int32_t>(rest - tile.before);
      const int32_t pieces = clamp_to(common.size() / min_piece, 1, each);  // the ranges behind these are empty
      if (piece == 0 || piece >= pieces) return {sequence, row + (piece > 0), 0};
      wanted = static_cast<int32_t>(quotient(int64_t{size} * piece, pieces));
      low *= piece;
      high *= pieces - piece;
    } else {
      wanted = static_cast<int32_t>(quotient(rest - tile.before, costs.tile_heads)) - kPieceCost;
      const int32_t near = size < 2 * min_piece ? size : min_piece;
      if (2 * wanted < near) return {sequence, row, 0};
      if (2 * (size - wanted) <= near) return {sequence, row + 1, 0};
      if (common.size() < 2 * min_piece) return {sequence, row, 0};
    }
    return {sequence, row, clamp_to(seen.first + wanted, common.first + low, common.end - high)};
  }
};

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
  const auto sum_of = [&](int32_t sharers) {
    WorkSum sum{};
    for (int64_t b = 0; b < shape.batch; ++b) sum = sum + RowCosts(shape, sequence_work(shape, b, sharers), b).sum();
    return sum;
  };
  WorkSum total = sum_of(1);
  int32_t sharers = sharers_of(total, limits);
  const WorkSum shared = sharers > 1 ? sum_of(sharers) : total;
  if (!can_share(total, shared, sharers)) sharers = 1;
  if (sharers > 1) total = shared;
  const Cuts cuts(total, limits, sharers);
  for (int32_t i = 0; i < kListSize; ++i) ranges[i] = 0;
  ranges[0] = cuts.num_ranges;
  ranges[1] = sharers;
  int32_t range = 0;
  int64_t before = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    const SequenceWork work = sequence_work(shape, b, sharers);
    const RowCosts costs(shape, work, b);
    const int64_t after = before + cuts.progress(costs.sum());
    for (; range < cuts.num_ranges && cuts.target(range) < after; ++range) {
      const auto sequence = static_cast<int32_t>(b);
      const int64_t offset = cuts.target(range) - before;
      set_range_start(ranges, range, cuts.start(shape, work, costs, sequence, offset, limits.min_piece));
    }
    before = after;
  }
}

// How many row tiles the shapes alone allow; reads no tensor.
PT_HOST_DEVICE int64_t row_tile_bound(const WorkShape& shape) {
  // Rounded up to full row tiles: if several heads share one, all row tiles count as equally large.
  const int32_t head_tiles = max_of(ceil_div(shape.num_kv_heads, shape.few_rows_heads), 1);
  const int64_t heads = head_tiles * ceil_div(shape.num_kv_heads, head_tiles);
  return heads * (shape.batch + ceil_div<int64_t>(shape.num_tokens * shape.group_size, shape.m_tile));
}

// How many ranges they allow, which keeps the scratch of small calls small.
PT_HOST_DEVICE int32_t range_bound(const WorkShape& shape, const RangeLimits& limits) {
  const int64_t row_tiles = row_tile_bound(shape);
  const int64_t row_cost = ceil_div<int64_t>(shape.max_seq_len, kKvTile) + 1 + kPieceCost;
  const int64_t enough = limits.most * limits.min_cost;
  const int64_t bound = row_tiles >= enough ? limits.most : row_tiles * row_cost / limits.min_cost;
  return static_cast<int32_t>(clamp_to<int64_t>(bound + row_tiles / 2, 1, limits.most));
}

// How many CTAs share a range of a plan, of at most `max_ctas` that there are.
PT_HOST_DEVICE int32_t planned_sharers(const int32_t* ranges, int32_t max_ctas) {
  return clamp_to<int32_t>(ranges[1], 1, min_of(kMostSharers, max_ctas));
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
PT_HOST_DEVICE WorkPosition range_start(const WorkShape& shape, const int32_t* ranges, int32_t num_ranges, int32_t i,
                                        int32_t sharers = 1) {
  if (i == 0) return {0, 0, 0};
  const WorkPosition end = {static_cast<int32_t>(shape.batch), 0, 0};
  if (i >= num_ranges) return end;
  const WorkPosition start = planned_start(ranges, i);
  if (start.sequence >= shape.batch) return end;
  const SequenceWork work = sequence_work(shape, start.sequence, sharers);
  return start.row_tile < work.row_tiles && start.kv_tile < work.kv_tiles ? start : start.next(work.row_tiles);
}

}  // namespace pagedtree
