// How work is cut into ranges of equal cost, on host and device.
// cost of a row tile = KV tiles with a visible key + kPieceCost per piece; range i starts where the sum reaches
// target(i)
#pragma once

#include <cmath>

#include "core/schedule.h"

namespace pagedtree {

// Divides inexactly on a GPU, which has no such instruction.
PT_HOST_DEVICE float divided(float value, float divisor) {
#if defined(__CUDA_ARCH__)
  return __fdividef(value, divisor);
#else
  return value / divisor;
#endif
}
// Returns 1 / value to 40 bits.
PT_HOST_DEVICE double reciprocal(double value) {
  const double near = divided(1.0f, static_cast<float>(value));
  return near * fma(-value, near, 2.0);
}

struct WorkSum {
  uint64_t cost;
  int32_t row_tiles;  // saturates above the maximum number of ranges
  int32_t dearest;    // maximum over row tiles of KV tiles times heads
  int32_t m_tiles;    // maximum per head

  PT_HOST_DEVICE WorkSum operator+(const WorkSum& other) const {
    return {cost + other.cost, min_of(row_tiles + other.row_tiles, kMaxPlanRanges + 1), max_of(dearest, other.dearest),
            max_of(m_tiles, other.m_tiles)};
  }
};

// Costs of a sequence's row tiles. In a causal sequence the KV tiles per M tile increase linearly, up to rounding,
// until the window is full.
struct RowCosts {
  float first, rise;  // cost of a head's first M tile, increase per M tile
  int32_t rising;     // M tile at which the increase ends
  WorkSum sum;
  uint32_t of_head;

  // Assigns each row tile the cost `each` if positive.
  PT_HOST_DEVICE RowCosts(const WorkShape& shape, const SequenceWork& work, uint32_t each) : rising(work.full_tile) {
    const int32_t last =
        work.kv_tiles - work.first_visible_tile(shape, static_cast<uint32_t>(work.m_tiles - 1) * work.tile_rows);
    const int32_t all = work.end_visible_tile(shape, work.tile_rows - 1), tiles = rising > 0 ? all : last;
    first = static_cast<float>((tiles + kPieceCost) * work.tile_heads);
    rise = divided(static_cast<float>(last - tiles), static_cast<float>(max_of(rising, 1)));
    if (each > 0) first = static_cast<float>(each), rising = 0;
    of_head = before(work.m_tiles);
    sum = {uint64_t{of_head} * static_cast<uint32_t>(work.head_tiles), min_of(work.row_tiles, kMaxPlanRanges + 1),
           work.m_tiles > 0 ? last * work.tile_heads : 0, work.m_tiles};
  }

  // Returns the cost of a head's first m M tiles; bounded, so that no bad lengths overflow a sum.
  PT_HOST_DEVICE uint32_t before(int32_t m) const {
    const auto count = static_cast<float>(m), of_rising = static_cast<float>(min_of(m, rising));
    const float above = of_rising * fmaf(-0.5f, of_rising, count - 0.5f);
    return static_cast<uint32_t>(min_of(fmaf(first, count, rise * above), 0x1p31f));
  }
};

struct RangeLimits {
  int32_t most;
  SmallDivisor multiple;  // larger numbers of ranges are multiples of it
  int64_t min_cost;       // per range
  int32_t min_piece;
  float held_tiles;  // KV tiles that a cache holds: no sharing if an M tile per head reads no more
  int32_t room = 0;  // up to this cost every KV tile is a range
  float most_in_cost = 1.0f / static_cast<float>(min_cost);  // ranges per cost

  PT_HOST_DEVICE void fit(const WorkSum& work) {
    if (work.cost > static_cast<uint32_t>(room)) return;
    const uint32_t cost = max_of(static_cast<uint32_t>(work.cost), 1u);
    min_piece = 1;
    most_in_cost =
        divided(static_cast<float>(cost) - static_cast<float>(work.row_tiles * kPieceCost), static_cast<float>(cost));
  }
};

// Returns a penalty for sharing; the smallest wins. High bits: CTAs without rows at a head's end. Low bits:
// kMostSharers - sharers.
PT_HOST_DEVICE uint32_t misfit(const WorkSum& alone, const RangeLimits& limits, int32_t sharers,
                               const SmallDivisor& by_sharers) {
  const auto m_tiles = static_cast<uint32_t>(alone.m_tiles), count = static_cast<uint32_t>(sharers);
  const uint32_t without = by_sharers.quotient(m_tiles + count - 1) * count - m_tiles;
  const float held = limits.held_tiles * static_cast<float>(m_tiles);
  const bool suits =
      (sharers > 1) & (sharers <= limits.most) & (without * 32 <= m_tiles) & (static_cast<float>(alone.cost) > held);
  return suits ? (without + 1) * kMostSharers - count : kMostSharers * kMostSharers - 1;
}

// Returns true if CTAs wait little for sharers that see more keys, or have rows at all.
PT_HOST_DEVICE bool can_share(float alone, const WorkSum& shared, int32_t sharers) {
  return static_cast<float>(shared.cost) * static_cast<float>(sharers) <= alone * (33.0f / 32.0f);
}

// Row tiles of similar cost get equal numbers of ranges, which do not cross row tiles; otherwise ranges have equal
// cost.
struct Cuts {
  int32_t num_ranges = 0;
  uint32_t each = 0;                 // cost per row tile; 0: they differ
  double step = 0.0, inverse = 0.0;  // cost of a range
  // Cost before the first range. Its first piece costs nothing extra, so it starts after one piece cost: ranges that
  // begin with a row tile are then not shorter. Slightly more, because quotients are only nearly exact.
  double begin = 0.0;

  Cuts() = default;
  PT_HOST_DEVICE Cuts(const WorkSum& work, const RangeLimits& limits, int32_t sharers, const SmallDivisor& by_sharers) {
    const auto parts = [](int32_t value, int32_t divisor) {
      return static_cast<int32_t>(divided(static_cast<float>(value) + 0.5f, static_cast<float>(divisor)));
    };
    const float total = static_cast<float>(work.cost), wanted = (total + 0.5f) * limits.most_in_cost;
    int32_t ctas =
        max_of(min_of(static_cast<int32_t>(min_of<float>(wanted, kMaxPlanRanges)) * sharers, limits.most), 1);
    const int32_t whole = ctas - static_cast<int32_t>(limits.multiple.remainder(static_cast<uint32_t>(ctas)));
    ctas = whole > 0 ? whole : ctas;
    num_ranges = max_of(static_cast<int32_t>(by_sharers.quotient(static_cast<uint32_t>(ctas))), 1);
    uint64_t cost = work.cost - kPieceCost;
    if (work.row_tiles > 0 && work.row_tiles <= num_ranges) {
      int32_t even = parts(num_ranges + work.row_tiles / 2, work.row_tiles);
      if (even * work.row_tiles * sharers > limits.most) --even;
      // Rounded cuts make ranges about one KV tile longer than their mean.
      const auto count = static_cast<float>(num_ranges);
      if (static_cast<float>(work.dearest + kPieceCost) * count <= (total + count) * static_cast<float>(even)) {
        each = static_cast<uint32_t>(work.dearest);
        num_ranges = even * work.row_tiles;
        cost = uint64_t{each} * static_cast<uint32_t>(work.row_tiles);
      }
    }
    begin = (each > 0 ? 0 : kPieceCost) + 0x1p-11;
    const double of_all = static_cast<double>(cost), count = num_ranges, of_both = reciprocal(of_all * count);
    step = of_all * of_all * of_both;
    inverse = count * count * of_both;
  }

  PT_HOST_DEVICE uint64_t target(int32_t i) const { return static_cast<uint64_t>(fma(i, step, begin)); }

  struct Start {
    WorkPosition at;
    int32_t head, m_tile = 0;
    int32_t number, count;  // index among its row tile's pieces, and their number
    uint64_t next;          // if nonzero, the range starts at the next row tile, with this cost before it
  };
  // Returns the start of range i at `target`, in a sequence after work of cost `before`; i < 0: at a row tile's
  // beginning. No piece has fewer than `min_piece` visible KV tiles; a row tile with few is not cut.
  PT_HOST_DEVICE Start start(const WorkShape& shape, const SequenceWork& work, const RowCosts& costs, int32_t sequence,
                             uint64_t before, uint64_t target, int32_t i, int32_t min_piece) const {
    Start start;
    const uint64_t offset = target - before;
    start.head = static_cast<int32_t>((static_cast<double>(offset) + 0.5) * reciprocal(costs.of_head));
    const uint32_t in_head = static_cast<uint32_t>(offset) - static_cast<uint32_t>(start.head) * costs.of_head;
    uint32_t low = 0, high = costs.of_head;  // costs before the row tile and the next
    int32_t end_tile = work.m_tiles;
    PT_NO_UNROLL
    do {
      const int32_t middle = (start.m_tile + end_tile) >> 1;
      const uint32_t cost = costs.before(middle);
      if (cost <= in_head) {
        start.m_tile = middle;
        low = cost;
      } else {
        end_tile = middle;
        high = cost;
      }
    } while (end_tile - start.m_tile > 1);
    // KV tiles that all sharers of the row tile see.
    const uint32_t first_row = static_cast<uint32_t>(start.m_tile) * work.tile_rows,
                   last_row = min_of(first_row + work.tile_rows, work.rows) - 1;
    const int32_t first = work.first_visible_tile(shape, last_row >> shape.m_tile_bits() << shape.m_tile_bits()),
                  end = max_of(work.end_visible_tile(shape, first_row + static_cast<uint32_t>(shape.m_tile) - 1),
                               first + 1);
    const int32_t size = end - first, near = size < 2 * min_piece ? size : min_piece,
                  piece_cost = each > 0 ? 0 : kPieceCost, cut_from = work.tile_heads * (piece_cost + ((near + 1) >> 1)),
                  cut_to = min_of(work.tile_heads * (piece_cost + size - (near >> 1)),
                                  static_cast<int32_t>(high - low) - (near > 1));
    const auto in_tile = static_cast<int32_t>(in_head - low);
    const double tile_begin = static_cast<double>(target - static_cast<uint32_t>(in_tile)) - begin;
    const auto first_cut = static_cast<int32_t>((tile_begin + cut_from) * inverse) + 1,
               end_cut = max_of(static_cast<int32_t>((tile_begin + cut_to) * inverse) + 1, first_cut);
    const int32_t wanted = first + in_tile / work.tile_heads - piece_cost;
    start.next = i >= end_cut ? target - static_cast<uint32_t>(in_tile) + (high - low) : 0;
    start.number = i < first_cut ? 0 : i - first_cut + 1;
    start.count = end_cut - first_cut + 1;
    const uint32_t row_tile = static_cast<uint32_t>(start.head * int64_t{work.m_tiles} + start.m_tile);
    start.at = {sequence, static_cast<int32_t>(row_tile),  // wraps for bad lengths
                i < first_cut ? 0 : clamp_to(wanted, first + min_piece, end - min_piece)};
    start.at.kv_tile = shape.segment_begin(min_of(start.at.kv_tile + shape.segment / 2, work.kv_tiles - 1));
    return start;
  }
};

// Writes the ranges [kListSize], which must be zero.
inline void make_ranges(const WorkShape& shape, RangeLimits limits, int32_t* ranges) {
  int32_t sharers = 1, most_heads = 1;
  const auto sum_of = [&] {
    WorkSum sum{};
    for (int64_t b = 0; b < shape.batch; ++b) {
      const SequenceWork work = sequence_work(shape, b, sharers);
      if (work.m_tiles > 0) most_heads = max_of(most_heads, work.tile_heads);
      sum = sum + RowCosts(shape, work, 0).sum;
    }
    return sum;
  };
  const WorkSum alone = sum_of();
  uint32_t least = UINT32_MAX;
  for (int32_t count = 1; count <= kMostSharers; ++count)
    least = min_of(least, misfit(alone, limits, count, SmallDivisor(count)));
  sharers = kMostSharers - static_cast<int32_t>(least % kMostSharers);
  WorkSum total = sharers > 1 ? sum_of() : alone;
  if (!can_share(static_cast<float>(alone.cost), total, sharers)) sharers = 1, total = alone;
  limits.fit(total);
  Cuts cuts(total, limits, sharers, SmallDivisor(sharers));
  const int32_t piece_cost = limits.min_piece * most_heads;  // may exceed a range if heads share row tiles
  if (cuts.each > 0 && cuts.num_ranges > total.row_tiles && cuts.step < piece_cost) {
    limits.most = total.row_tiles * max_of(total.dearest / piece_cost, 1);
    cuts = Cuts(total, limits, sharers, SmallDivisor(sharers));
  }
  ranges[0] = cuts.num_ranges;
  ranges[1] = sharers;
  int32_t begun = 0;
  uint64_t before = 0, moved = 0;  // moved: cost before the row tile to which the last range moved
  for (int64_t b = 0; b < shape.batch; ++b) {
    const SequenceWork work = sequence_work(shape, b, sharers);
    const RowCosts costs(shape, work, cuts.each);
    const uint64_t after = before + costs.sum.cost;
    while (begun < cuts.num_ranges) {
      const bool moves = cuts.target(begun) < moved;
      const uint64_t target = moves ? moved : cuts.target(begun);
      if (target >= after) break;
      const Cuts::Start start =
          cuts.start(shape, work, costs, static_cast<int32_t>(b), before, target, moves ? -1 : begun, limits.min_piece);
      moved = max_of(moved, start.next);
      if (start.next == 0) set_range_start(ranges, begun++, start.at);
    }
    before = after;
  }
  const WorkPosition end = {static_cast<int32_t>(shape.batch), 0, 0};
  for (begun = max_of(begun, 1); begun < cuts.num_ranges; ++begun) set_range_start(ranges, begun, end);
}

// Bounds the row tiles by shapes; reads no tensor.
PT_HOST_DEVICE int64_t row_tile_bound(const WorkShape& shape) {
  // Rounded to full row tiles: shared ones count as equally large.
  const int32_t head_tiles = max_of(ceil_div(shape.num_kv_heads, shape.few_rows_heads), 1);
  const int64_t heads = head_tiles * ceil_div(shape.num_kv_heads, head_tiles);
  return heads * (shape.batch + ceil_div<int64_t>(shape.num_tokens * shape.group_size, shape.m_tile));
}

// Keeps the scratch of small calls small.
PT_HOST_DEVICE int32_t range_bound(const WorkShape& shape, const RangeLimits& limits) {
  const int64_t row_tiles = row_tile_bound(shape);
  const int64_t row_cost = ceil_div<int64_t>(shape.max_seq_len, kKvTile) + 1 + kPieceCost;
  const int64_t least = limits.room > 0 ? 1 : limits.min_cost, enough = limits.most * least;
  const int64_t bound = row_tiles >= enough ? limits.most : row_tiles * row_cost / least;
  return static_cast<int32_t>(clamp_to<int64_t>(bound + row_tiles / 2, 1, limits.most));
}

}  // namespace pagedtree
