// Merges the segments of rows with keys in several, in key order, after the kernels that store them.
#pragma once

#include "cuda/attention/output.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {

constexpr uint32_t kSegmentRows = 4;  // per CTA, one warp each

// One warp per query head of a token.
template <typename T>
__global__ void __launch_bounds__(kSegmentRows * 32)
    join_segments_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CallShape call) {
  ptx::wait_for_kernels_before();
  ptx::let_next_kernel_start();
  const int32_t heads = p.num_kv_heads * p.group_size;
  const int64_t item = int64_t{blockIdx.x} * kSegmentRows + threadIdx.x / 32, token = item / heads;
  if (token >= p.num_tokens) return;
  const auto head = static_cast<int32_t>(item - token * heads),
             b = static_cast<int32_t>(sequence_of_row(p.cu_seqlens_q, p.batch, token));
  if (b < 0) return;
  const SequenceWork work = sequence_work(call.work, b);
  if (!work.has_segments(call.work)) return;  // already in the output
  const auto query = static_cast<int32_t>(token - work.tokens.begin),
             num_queries = static_cast<int32_t>(work.tokens.size());
  const RowTile tile{{1, head / p.group_size, static_cast<uint32_t>(query * p.group_size + head % p.group_size),
                      static_cast<int32_t>(work.tokens.begin)},
                     b,
                     num_queries,
                     work.seq_len,
                     tree_length(p, b, num_queries, work.seq_len)};
  const VisibleSegments seen(call.work, row_visibility(p, tile, 0));
  float maximum = -kInfinity, sum = 0.0f;
  const auto piece_of = [&](int32_t i) { return call.pieces.of_segment(p, call.work, tile, i * call.work.segment); };
  for (int32_t i = seen.begin; i < seen.end; ++i) maximum = fmaxf(maximum, piece_of(i).states->x);
  for (int32_t i = seen.begin; i < seen.end; ++i) {
    const float2 state = *piece_of(i).states;
    sum = __fmaf_rn(state.y, weight_of(state.x, maximum), sum);
  }
  const ToOutput<T> output{p, tile, call.out_aligned};
  for (uint32_t column = threadIdx.x % 32 * 4; column < static_cast<uint32_t>(p.head_dim_v); column += 128) {
    float values[4] = {};
    for (int32_t i = seen.begin; i < seen.end; ++i) {
      const Piece piece = piece_of(i);
      const float weight = weight_of(piece.states->x, maximum);
      const float4 out = *reinterpret_cast<const float4*>(piece.out + column);
      const float of_piece[4] = {out.x, out.y, out.z, out.w};
      for (int d = 0; d < 4; ++d) values[d] = __fmaf_rn(of_piece[d], weight, values[d]);
    }
    output.row(0, maximum, sum, column == 0).store(column, values);
  }
}

}  // namespace pagedtree::cuda
