// The attention kernel: a grid of CTAs that take the ranges of the plan, each range row tile by row tile.
#pragma once

#include "cuda/tile/launch.cuh"
#include "cuda/tree_attention/output.cuh"

namespace pagedtree::cuda {

// Rows of no sequence, the padding of a captured graph: out 0, lse -inf.
template <typename I>
__device__ __forceinline__ void clear_tokens(const TreeAttentionParams& p, int64_t begin, int64_t end) {
  const int64_t heads = int64_t{p.num_kv_heads} * p.group_size;
  const int64_t first = begin * heads + blockIdx.x;
  for (int64_t row = first; row < end * heads; row += gridDim.x) {
    const int64_t token = row / heads, head = row % heads;
    uint16_t* out = static_cast<uint16_t*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
    for (int d = static_cast<int>(threadIdx.x); d < I::kHeadDim; d += I::kThreads) out[d] = 0;
    if (threadIdx.x == 0 && p.lse != nullptr) {
      p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = -kInfinity;
    }
  }
}

// What the lane's own rows see, and in `bounds` what the rows of the tile see in common. A barrier must follow before
// shared memory is written again.
template <typename I>
__device__ __forceinline__ KeyBounds find_views(const TreeAttentionParams& p, const RowTile& tile, uint32_t thread,
                                                Shared<I>& shared, RowView (&views)[I::kAtoms]) {
  const uint32_t lane = thread % 32, warp = thread / 32;
  KeyBounds bounds = KeyBounds::none();
#pragma unroll
  for (uint32_t a = 0; a < I::kAtoms; ++a) {
    const uint32_t row = warp % I::kShape.row_warps * I::kShape.warp_rows() + a * 16 + own_row(lane);
    const Visibility seen = row_visibility(p, tile, row);
    views[a] = RowView::of(seen);
    if (row < tile.rows) bounds = bounds.join(KeyBounds::of(seen));
  }
  bounds = bounds.over_warp();
  if (lane == 0) shared.bounds[warp] = bounds;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < I::kShape.row_warps; ++w) bounds = bounds.join(shared.bounds[w]);
  return bounds;
}

// The rows against KV tiles [begin, end). Stages come through a ring; while one is worked on, the copies of later ones
// are under way, and the page ids of the one after them are read. One barrier a stage: what it lets pass is that the
// stage has arrived and that the one before it is used up.
template <typename I>
__device__ __forceinline__ void attend_tiles(const TreeAttentionParams& p, const CallShape& call, const RowTile& tile,
                                             int32_t begin, int32_t end, Shared<I>& shared, Accumulator<I>& sums) {
  constexpr int kKeys = I::kShape.keys, kStagesInTile = kKvTile / kKeys;
  const uint32_t thread = ptx::thread_index(), warp = thread / 32;
  const int32_t key_of_thread = static_cast<int32_t>(thread), ring = call.stages;
  const ScoreLaw law(p, tile.kv_head);
  sums.clear();
  __syncthreads();  // the row tile before this one is done with shared memory
  if (thread == 0) shared.reader = KeyReader::of(p, tile);
  load_q_tile<I>(p, tile, thread, call.q_aligned, law.negate_q, shared.q);
  RowView views[I::kAtoms];
  const KeyBounds bounds = find_views<I>(p, tile, thread, shared, views);

  const int32_t first = max_of(begin * kStagesInTile, bounds.lowest / kKeys);
  const int32_t count = min_of(end * kStagesInTile, ceil_div(bounds.highest, kKeys)) - first;
  for (int32_t i = key_of_thread; i < min_of(ring, count) * kKeys; i += I::kThreads) {
    const int32_t key = first * kKeys + i;
    const KeyReader& reader = shared.reader;
    shared.stage(i / kKeys).rows[i % kKeys] = reader.row<typename I::Kv>(p, key, reader.page(key));
  }
  __syncthreads();
  for (int s = 0; s < ring - 1; ++s) {
    if (s < count) copy_stage<I>(shared.stage(s), thread);
    ptx::cp_async_commit();
  }

  const bool has_rows = warp % I::kShape.row_warps * I::kShape.warp_rows() < tile.rows;
  int now = 0, next = ring - 1;  // places in the ring: of stage i, of the stage whose copies start
  for (int32_t i = 0; i < count; ++i) {
    wait_for_stage(ring);
    __syncthreads();
    if (i + ring - 1 < count) copy_stage<I>(shared.stage(next), thread);
    ptx::cp_async_commit();
    const int32_t first_key = (first + i) * kKeys, later_key = first_key + ring * kKeys + key_of_thread;
    const bool reads_page = thread < kKeys && i + ring < count;
    const int32_t page = reads_page ? shared.reader.page(later_key) : -1;

    Stage<I>& stage = shared.stage(now);
    if (has_rows) {
      if (bounds.plain_begin <= first_key && first_key + kKeys <= bounds.plain_end) {
        attend_stage<false, I>(p, tile, shared, stage, thread, first_key, views, law, sums);
      } else {
        attend_stage<true, I>(p, tile, shared, stage, thread, first_key, views, law, sums);
      }
    }
    if (reads_page) stage.rows[thread] = shared.reader.template row<typename I::Kv>(p, later_key, page);
    next = now;
    now = now + 1 == ring ? 0 : now + 1;
  }
  ptx::cp_async_wait<0>();
}

// A row tile from `at` to KV tile `end`: the whole of it, or a piece. The tile is looked up again for its output,
// rather than kept in registers beside the accumulators.
template <typename I>
__device__ __forceinline__ void attend_piece(const TreeAttentionParams& p, const CallShape& call, int32_t range,
                                             const WorkPosition& at, int32_t end) {
  Shared<I>& shared = ptx::shared<Shared<I>>();
  const WarpParts<I> parts{shared};
  const auto find_tile = [&] {
    return row_tile(p, sequence_work(call.work, at.sequence), at.sequence, at.row_tile, I::kMTile);
  };
  {
    Accumulator<I> sums;
    attend_tiles<I>(p, call, find_tile(), at.kv_tile, end, shared, sums);
    __syncthreads();
    parts.store(sums);
  }
  __syncthreads();
  const RowTile tile = find_tile();
  const ToOutput<typename I::T> output{p, tile, call.out_aligned};
  if (at.kv_tile == 0 && end == tile.kv_tiles()) return join<I>(parts, tile.rows, output);
  const Ranges& ranges = call.ranges;
  join<I>(parts, tile.rows, ToPiece{ranges.piece(range, at.kv_tile == 0), I::kHeadDim});
  const int32_t owner = at.kv_tile == 0 ? range : ranges.owners[range];
  join_pieces<I>(ranges, owner, range - owner, tile.rows, output);
}

template <typename I>
__global__ void __launch_bounds__(I::kThreads, I::kShape.max_ctas())
    attention_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ CallShape call) {
  const WorkShape& shape = call.work;
  const int64_t first_token = shape.batch > 0 ? clamp_to<int64_t>(p.cu_seqlens_q[0], 0, p.num_tokens) : 0;
  const int64_t last_token =
      shape.batch > 0 ? clamp_to<int64_t>(p.cu_seqlens_q[shape.batch], first_token, p.num_tokens) : 0;
  clear_tokens<I>(p, 0, first_token);
  clear_tokens<I>(p, last_token, p.num_tokens);

  for (int32_t range = static_cast<int32_t>(blockIdx.x); range < *call.ranges.count;
       range += static_cast<int32_t>(gridDim.x)) {
    WorkPosition at = call.ranges.starts[range];
    for (;;) {
      const WorkPosition stop = call.ranges.starts[range + 1];
      if (!at.before(stop)) break;
      const SequenceWork work = sequence_work(shape, at.sequence);
      if (at.row_tile < work.row_tiles) {
        attend_piece<I>(p, call, range, at, at.same_row(stop) ? stop.kv_tile : work.kv_tiles);
      }
      at.kv_tile = 0;
      if (++at.row_tile >= sequence_work(shape, at.sequence).row_tiles) at = {at.sequence + 1, 0, 0};
    }
  }
}

template <typename I>
void launch_attention(const TreeAttentionParams& p, const CallShape& call, unsigned grid, int shared_bytes,
                      void* stream) {
  launch(attention_kernel<I>, dim3(grid), dim3(I::kThreads), static_cast<size_t>(shared_bytes), stream, p, call);
}

}  // namespace pagedtree::cuda
