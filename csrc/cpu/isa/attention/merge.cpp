// Merges partial results over disjoint sets of keys.
// out = sum of 2^(max_i - max) out_i / sum of 2^(max_i - max) sum_i
#include "cpu/isa/attention/kernels.h"
#include "cpu/isa/attention/row_tile.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

float weight_of(float maximum, float top) { return maximum == -kInfinity ? 0.0f : __builtin_exp2f(maximum - top); }

void add_scaled(float* sum, const float* row, int64_t count, float factor) {
  for (int64_t d = 0; d < count; d += kLanes) store(sum + d, muladd(load(row + d), splat(factor), load(sum + d)));
}

// Skips a side with factor 0, which may hold anything.
template <DType kType>
void merge_row(const char* a, float factor_a, const char* b, float factor_b, char* out, int64_t count) {
  constexpr int64_t kSize = element_size(kType);
  for (int64_t d = 0; d < count; d += kLanes) {
    const int64_t width = min_of<int64_t>(kLanes, count - d);
    char buffer[3][kLanes * kSize] = {};
    const char *from_a = a + d * kSize, *from_b = b + d * kSize;
    char* to = out + d * kSize;
    if (width < kLanes) {
      from_a = static_cast<const char*>(std::memcpy(buffer[0], from_a, static_cast<size_t>(width * kSize)));
      from_b = static_cast<const char*>(std::memcpy(buffer[1], from_b, static_cast<size_t>(width * kSize)));
      to = buffer[2];
    }
    vfloat sum = splat(0.0f);
    if (factor_a != 0.0f) sum += load_float<kType>(from_a) * factor_a;
    if (factor_b != 0.0f) sum += load_float<kType>(from_b) * factor_b;
    store_float<kType>(to, sum);
    if (width < kLanes) std::memcpy(out + d * kSize, buffer[2], static_cast<size_t>(width * kSize));
  }
}

// Merges row r, which is row `row` of each of the pieces [begin, end), in order.
template <typename PieceOf>
void join_row(const TreeAttentionParams& p, const RowTile& tile, int64_t r, int64_t row, int32_t begin, int32_t end,
              const PieceOf& piece_of) {
  alignas(kScratchAlignment) float out[kMaxHeadDimV];
  float top = -kInfinity, sum = 0.0f;
  for (int32_t i = begin; i < end; ++i) top = __builtin_fmaxf(top, piece_of(i).maximum[row]);
  for (int64_t d = 0; d < p.head_dim_v; d += kLanes) store(out + d, splat(0.0f));
  for (int32_t i = begin; i < end; ++i) {
    const Piece piece = piece_of(i);
    const float weight = weight_of(piece.maximum[row], top);
    sum += weight * piece.sum[row];
    add_scaled(out, piece.out + row * p.head_dim_v, p.head_dim_v, weight);
  }
  finish_row(p, tile, r, out, top, sum);
}

void join_segments(const TreeAttentionParams& p, const AttentionRanges& ranges, int64_t item) {
  const auto sequence = static_cast<int32_t>(item / p.num_kv_heads),
             kv_head = static_cast<int32_t>(item % p.num_kv_heads);
  const SequenceWork work = sequence_work(ranges.shape, sequence);
  if (!work.has_segments(ranges.shape)) return;
  const int64_t tree_len = tree_length(p, sequence, static_cast<int32_t>(work.tokens.size()), work.seq_len);
  const RowTile tile{sequence, kv_head, work, 1, 0, static_cast<int32_t>(work.rows)};
  for (int64_t r = 0; r < tile.rows; ++r) {
    const VisibleSegments seen(ranges.shape, query_visibility(p, work, tree_len, r / p.group_size));
    join_row(p, tile, r, r, seen.begin, seen.end,
             [&](int32_t i) { return ranges.segment(p, i * ranges.shape.segment, kv_head, work.tokens.begin); });
  }
}

}  // namespace

void merge_pieces(const TreeAttentionParams& p, const AttentionRanges& ranges, int64_t range) {
  if (p.segment > 0) return join_segments(p, ranges, range);
  const WorkPosition stop = ranges.starts[range + 1];
  const WorkPosition row_start = {stop.sequence, stop.row_tile, 0};
  if (stop.kv_tile == 0 || row_start.before(ranges.starts[range])) return;  // nothing cut, or begun by another range

  // Pieces in key order: this range's tail, then heads up to the range that ends the row tile.
  Piece pieces[kMaxRanges];
  int32_t count = 0;
  pieces[count++] = ranges.piece(range, AttentionRanges::kTail);
  for (int32_t next = range + 1; next < ranges.count && ranges.starts[next].same_row(stop); ++next) {
    if (!ranges.starts[next].before(ranges.starts[next + 1])) continue;  // an empty range
    pieces[count++] = ranges.piece(next, AttentionRanges::kHead);
  }

  const RowTile tile = row_tile(p, ranges.shape, stop.sequence, stop.row_tile);
  for (int32_t r = 0; r < tile.heads * tile.rows; ++r) {
    join_row(p, tile.only(r / tile.rows), r % tile.rows, r, 0, count, [&](int32_t i) { return pieces[i]; });
  }
}

void merge_states(const MergeStatesParams& p, int64_t begin, int64_t end) {
  const int64_t size = element_size(p.dtype);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t token = i / p.num_heads, head = i % p.num_heads;
    const float lse_a = p.lse_a[token * p.lse_a_token_stride + head * p.lse_a_head_stride];
    const float lse_b = p.lse_b[token * p.lse_b_token_stride + head * p.lse_b_head_stride];
    const float top = __builtin_fmaxf(lse_a, lse_b);
    const float weight_a = lse_a == -kInfinity ? 0.0f : __builtin_expf(lse_a - top);
    const float weight_b = lse_b == -kInfinity ? 0.0f : __builtin_expf(lse_b - top);
    const float sum = weight_a + weight_b;
    p.lse[i] = sum == 0.0f ? -kInfinity : top + __builtin_logf(sum);
    const float factor_a = sum == 0.0f ? 0.0f : weight_a / sum, factor_b = sum == 0.0f ? 0.0f : weight_b / sum;
    const char* a = static_cast<const char*>(p.out_a) + (token * p.a_token_stride + head * p.a_head_stride) * size;
    const char* b = static_cast<const char*>(p.out_b) + (token * p.b_token_stride + head * p.b_head_stride) * size;
    char* out = static_cast<char*>(p.out) + i * p.head_dim * size;
    with_dtype(p.dtype, [&]<DType kType>() {
      if constexpr (kType != DType::kFloat8E4M3) {
        merge_row<kType>(a, factor_a, b, factor_b, out, p.head_dim);
      }
    });
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
