// Tree attention over one range of work.
// for row tile, KV tile with a visible key: S = Q K^T; P = 2^(S - max); out = rescale(out) + P V
#include "cpu/isa/attention/engine_bf16.h"
#include "cpu/isa/attention/engine_dot.h"
#include "cpu/isa/attention/engine_dot_bf16.h"
#include "cpu/isa/attention/engine_fp32.h"
#include "cpu/isa/attention/kernels.h"
#include "cpu/isa/attention/softmax.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

template <typename Engine>
void softmax_tile(const TreeAttentionParams& p, const RowTile& tile, const ScoreMap& score, const uint64_t* visible,
                  const Workspace& ws, const Engine& engine, const KeyRows& next) {
  TilePrefetch prefetch(p, next);
  const int64_t share = ceil_div<int64_t>(prefetch.lines(), tile.rows);
  for (int32_t r = 0; r < tile.rows; ++r) {
    if constexpr (Engine::kPacks) prefetch.step(share);
    const float* row = ws.scores + r * kKvTile;
    const auto keep = [&](int64_t key, vfloat weights) { engine.store_weights(r, key, weights); };
    if (visible == nullptr) {
      ws.factors[r] = softmax_row<false>(row, 0, score, ws.states[r], keep);
    } else {
      const int64_t token = (tile.first_row + r) / p.group_size - tile.first_row / p.group_size;
      ws.factors[r] = softmax_row<true>(row, visible[token], score, ws.states[r], keep);
    }
  }
}

// Computes unnormalised results over KV tiles [begin, end) into ws.out and ws.states, head by head.
template <typename Engine>
void attend_with(const TreeAttentionParams& p, const RowTile& tile, int64_t begin, int64_t end, const Workspace& ws) {
  TileVisibility seen;
  see(p, tile, seen);
  const auto each_head = [&](const auto& body) {
    for (int32_t h = 0; h < tile.heads; ++h) {
      const RowTile head = tile.only(h);
      const Workspace head_ws = ws.from_row(int64_t{h} * tile.rows, p.head_dim, p.head_dim_v);
      body(h, head, head_ws, Engine(p, head, head_ws));
    }
  };
  each_head([&](int32_t, const RowTile& head, const Workspace& head_ws, const Engine& engine) {
    engine.load_q();
    for (int64_t i = 0; i < head.rows * p.head_dim_v; i += kLanes) store(head_ws.out + i, splat(0.0f));
    for (int32_t r = 0; r < head.rows; ++r) head_ws.states[r] = {-kInfinity, 0.0f};
  });

  const int64_t visible_end = ceil_div<int64_t>(seen.highest, kKvTile);
  begin = max_of(begin, seen.lowest / kKvTile);
  end = min_of(end, visible_end);
  KeyRows first[2];  // of the first head: this tile and the next, which is prefetched
  if (begin < end) find_key_rows(p, tile, begin * kKvTile, kAllKeys, first[begin % 2]);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t first_key = t * kKvTile;
    KeyRows &now = first[t % 2], &next = first[(t + 1) % 2];
    // Also prefetches past the end: a thread usually continues there.
    if (t + 1 < visible_end) find_key_rows(p, tile, first_key + kKvTile, kAllKeys, next);
    const bool plain = seen.plain_begin <= first_key && first_key + kKvTile <= seen.plain_end;
    uint64_t visible[kMTile];
    if (!plain) {
      const uint64_t wanted = visible_keys(seen, first_key, visible);
      if (wanted == 0) continue;
      find_key_rows(p, tile, first_key, wanted, now);
    }
    each_head([&](int32_t h, const RowTile& head, const Workspace& head_ws, const Engine& engine) {
      if (h > 0) step_head(p, now);
      KeyRows share;
      prefetch_share(p, h, tile.heads, t + 1 < visible_end ? next : now, share);
      if constexpr (requires { engine.attend(now, share, visible); }) {
        engine.attend(now, share, plain ? nullptr : visible);
      } else {
        engine.scores(now, share);
        softmax_tile(p, head, score_map(p, head.kv_head), plain ? nullptr : visible, head_ws, engine, share);
        engine.accumulate(now, share);
      }
    });
  }
  each_head([](int32_t, const RowTile&, const Workspace&, const Engine& engine) { engine.finish(); });
}

// Selects the engine; `few`: the whole row tile has few rows.
void attend_tiles(const TreeAttentionParams& p, const RowTile& tile, bool few, int64_t begin, int64_t end,
                  const Workspace& ws) {
#if defined(PAGEDTREE_BF16_GEMM)
  if (few && Bf16Engine::takes(p)) {
    return with_dtype(p.kv_dtype, [&]<DType kType>() {
      if constexpr (kType == DType::kBFloat16 || kType == DType::kFloat8E4M3) {
        attend_with<DotBf16Engine<kType>>(p, tile, begin, end, ws);
      }
    });
  }
#endif
  if (few) {
    return with_dtype(p.kv_dtype, [&]<DType kType>() { attend_with<DotEngine<kType>>(p, tile, begin, end, ws); });
  }
#if defined(PAGEDTREE_BF16_GEMM)
  if (Bf16Engine::takes(p)) return attend_with<Bf16Engine>(p, tile, begin, end, ws);
#endif
  attend_with<Fp32Engine>(p, tile, begin, end, ws);
}

// Returns true if a row may have met an invisible non-finite value, whose weight of 0 yields NaN. Scores do not mix
// rows, and a NaN sum has a visible cause.
bool is_poisoned(const TreeAttentionParams& p, const RowTile& tile, const Workspace& ws) {
  if (tile.token(p, 0) == tile.token(p, tile.rows - 1)) return false;  // equal visibility
  vint poisoned{};
  for (int64_t r = 0; r < int64_t{tile.heads} * tile.rows; ++r) {
    if (ws.states[r].sum != ws.states[r].sum) continue;
    const float* row = ws.out + r * p.head_dim_v;
    for (int64_t d = 0; d < p.head_dim_v; d += kLanes) poisoned |= load(row + d) * 0.0f != 0.0f;
  }
  return lane_bits(poisoned) != 0;
}

void keep_row(const TreeAttentionParams& p, const Piece& piece, int64_t row, const float* out, const RowState& state) {
  for (int64_t d = 0; d < p.head_dim_v; d += kLanes) store(piece.out + row * p.head_dim_v + d, load(out + d));
  piece.maximum[row] = state.maximum;
  piece.sum[row] = state.sum;
}

// Computes a row tile over KV tiles; writes the output, or keeps a partial result.
void attend_row_tile(const TreeAttentionParams& p, const AttentionRange& range, const RowTile& tile, KvTiles keys,
                     const Workspace& ws) {
  const AttentionRanges& ranges = *range.ranges;
  const auto attend_part = [&](const RowTile& part) {
    attend_tiles(p, part, tile.rows <= kFewRows, keys.begin, keys.end, ws);
    for (int32_t h = 0; h < part.heads; ++h) {
      for (int32_t r = 0; r < part.rows; ++r) {
        const int64_t in_tile = part.first_row - tile.first_row + r;
        const float* out = ws.out + (h * part.rows + r) * p.head_dim_v;
        const RowState& state = ws.states[h * part.rows + r];
        if (keys.begin == 0 && keys.end == tile.work.kv_tiles) {
          finish_row(p, part.only(h), r, out, state.maximum, state.sum);
        } else if (p.segment > 0) {
          const Piece piece = ranges.segment(p, keys.begin, part.kv_head + h, tile.work.tokens.begin);
          keep_row(p, piece, part.first_row + r, out, state);
        } else {
          const auto side = keys.begin > 0 ? AttentionRanges::kHead : AttentionRanges::kTail;
          keep_row(p, ranges.piece(range.index, side), int64_t{h} * tile.rows + in_tile, out, state);
        }
      }
    }
  };
  attend_part(tile);
  if (!is_poisoned(p, tile, ws)) return;
  // Recomputes each token separately: a row's bits must not depend on other rows.
  RowTile part = tile;
  for (int64_t left = tile.rows; left > 0; part.first_row += part.rows, left -= part.rows) {
    part.rows = static_cast<int32_t>(min_of(left, p.group_size - part.first_row % p.group_size));
    attend_part(part);
  }
}

}  // namespace

void attend(const TreeAttentionParams& p, const AttentionRange& range) {
  const AttentionRanges& ranges = *range.ranges;
  const WorkPosition start = ranges.starts[range.index], stop = ranges.starts[range.index + 1];
  const Workspace ws(range.workspace, p.head_dim, p.head_dim_v);
#if defined(PAGEDTREE_BF16_GEMM)
  [[maybe_unused]] const TileSession session;
#endif
  for (int64_t b = start.sequence; b <= stop.sequence && b < ranges.shape.batch; ++b) {
    const SequenceWork work = sequence_work(ranges.shape, b);
    const int32_t first = b == start.sequence ? start.row_tile : 0;
    const int32_t last = b == stop.sequence ? stop.row_tile : work.row_tiles - 1;
    for (int32_t index = first; index <= last && index < work.row_tiles; ++index) {
      const int32_t begin = b == start.sequence && index == start.row_tile ? start.kv_tile : 0;
      const int32_t end = b == stop.sequence && index == stop.row_tile ? stop.kv_tile : work.kv_tiles;
      if (begin >= end) continue;
      const RowTile tile = row_tile(p, ranges.shape, b, index);
      SequenceWork seen = work;
      seen.tree_len = static_cast<int32_t>(tree_length(p, b, static_cast<int32_t>(work.tokens.size()), work.seq_len));
      const auto first_row = static_cast<uint32_t>(tile.first_row),
                 last_row = static_cast<uint32_t>(tile.first_row + tile.rows - 1);
      const auto next = [&](int32_t from) {
        return seen.first_segment(ranges.shape, first_row, last_row, {from, end});
      };
      for (KvTiles keys = next(begin); keys.begin < keys.end; keys = next(keys.end)) {
        attend_row_tile(p, range, tile, keys, ws);
      }
    }
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
