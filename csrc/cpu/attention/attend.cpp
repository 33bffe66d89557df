// Compiled once per instruction set: tree attention over one range of work.
#include "cpu/attention/kernels.h"
#include "cpu/attention/pack.h"
#include "cpu/attention/softmax.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

// A worker's memory, laid out for `head_dim`.
struct Workspace {
  float *q, *k, *v, *scores, *out, *factors;
  RowState* states;

  Workspace(void* memory, int64_t head_dim) {
    q = static_cast<float*>(memory);
    out = q + kMTile * head_dim;
    k = out + kMTile * head_dim;
    v = k + kKvTile * head_dim;
    scores = v + kKvTile * head_dim;
    factors = scores + kMTile * kKvTile;
    states = reinterpret_cast<RowState*>(factors + kMTile);
  }
};

void softmax_tile(const TreeAttentionParams& p, const RowTile& tile, const ScoreLaw& law, const uint64_t* visible,
                  const Workspace& ws) {
  for (int32_t r = 0; r < tile.rows; ++r) {
    float* row = ws.scores + r * kKvTile;
    const auto keep = [row](int i, vfloat weight) { store(row + i * kLanes, weight); };
    if (visible == nullptr) {
      ws.factors[r] = softmax_row<false>(row, 0, law, ws.states[r], keep);
    } else {
      const int64_t token = (tile.first_row + r) / p.group_size - tile.first_row / p.group_size;
      ws.factors[r] = softmax_row<true>(row, visible[token], law, ws.states[r], keep);
    }
  }
}

// The rows' results over KV tiles [begin, end), unnormalised, in ws.out and ws.states.
void attend_tiles(const TreeAttentionParams& p, const RowTile& tile, int64_t begin, int64_t end, const Workspace& ws) {
  TileVisibility seen;
  see(p, tile, seen);
  const ScoreLaw law = score_law(p, tile.kv_head);
  with_dtype(p.q_dtype, [&]<DType kType>() { pack_q<kType>(p, tile, ws.q); });
  for (int64_t i = 0; i < tile.rows * p.head_dim; i += kLanes) store(ws.out + i, splat(0.0f));
  for (int32_t r = 0; r < tile.rows; ++r) ws.states[r] = {-kInfinity, 0.0f};

  begin = max_of(begin, seen.lowest / kKvTile);
  end = min_of(end, ceil_div<int64_t>(seen.highest, kKvTile));
  for (int64_t t = begin; t < end; ++t) {
    const int64_t first_key = t * kKvTile;
    const bool plain = seen.plain_begin <= first_key && first_key + kKvTile <= seen.plain_end;
    uint64_t visible[kMTile];
    const uint64_t wanted = plain ? ~uint64_t{0} : visible_keys(seen, first_key, visible);
    if (wanted == 0) continue;
    KeyRows rows;
    find_key_rows(p, tile, first_key, wanted, rows);
    with_dtype(p.kv_dtype, [&]<DType kType>() { pack_k<kType>(rows.k, p.head_dim, ws.k); });
    gemm<false>(ws.q, p.head_dim, ws.k, p.head_dim, nullptr, ws.scores, kKvTile, tile.rows, kKvTile);
    softmax_tile(p, tile, law, plain ? nullptr : visible, ws);
    with_dtype(p.kv_dtype, [&]<DType kType>() { pack_v<kType>(rows.v, p.head_dim, ws.v); });
    gemm<true>(ws.scores, kKvTile, ws.v, kKvTile, ws.factors, ws.out, p.head_dim, tile.rows, p.head_dim);
  }
}

void keep_piece(const TreeAttentionParams& p, const RowTile& tile, const Workspace& ws, const Piece& piece) {
  for (int64_t i = 0; i < tile.rows * p.head_dim; i += kLanes) store(piece.out + i, load(ws.out + i));
  for (int32_t r = 0; r < tile.rows; ++r) {
    piece.maximum[r] = ws.states[r].maximum;
    piece.sum[r] = ws.states[r].sum;
  }
}

}  // namespace

void attend(const TreeAttentionParams& p, const AttentionRange& range) {
  const AttentionRanges& ranges = *range.ranges;
  const WorkPosition start = ranges.starts[range.index], stop = ranges.starts[range.index + 1];
  const Workspace ws(range.workspace, p.head_dim);
  for (int64_t b = start.sequence; b <= stop.sequence && b < ranges.shape.batch; ++b) {
    const SequenceWork work = sequence_work(ranges.shape, b);
    const int32_t first = b == start.sequence ? start.row_tile : 0;
    const int32_t last = b == stop.sequence ? stop.row_tile : work.row_tiles - 1;
    for (int32_t index = first; index <= last && index < work.row_tiles; ++index) {
      const int64_t begin = b == start.sequence && index == start.row_tile ? start.kv_tile : 0;
      const int64_t end = b == stop.sequence && index == stop.row_tile ? stop.kv_tile : work.kv_tiles;
      if (begin >= end) continue;
      const RowTile tile = row_tile(p, ranges.shape, b, index);
      attend_tiles(p, tile, begin, end, ws);
      if (begin > 0) {
        keep_piece(p, tile, ws, ranges.piece(range.index, AttentionRanges::kHead));
      } else if (end < work.kv_tiles) {
        keep_piece(p, tile, ws, ranges.piece(range.index, AttentionRanges::kTail));
      } else {
        for (int32_t r = 0; r < tile.rows; ++r) {
          finish_row(p, tile, r, ws.out + r * p.head_dim, ws.states[r].maximum, ws.states[r].sum);
        }
      }
    }
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
