// Split-KV attention with mma.sync. A CTA processes a kv range of the plan, row tile by row tile: load Q; for each
// stage, S = Q K^T, online softmax, O += P V; then the epilogue, or a partial result.
#pragma once

#include "cuda/attention/join.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {

// Writes each row's visible keys to shared memory and returns their common bounds. Rows past the end repeat the last
// one. Callers synchronize before they write shared memory again.
template <typename I>
__device__ __forceinline__ KeyBounds find_views(const AttentionParams& p, const RowTile& tile, uint32_t thread,
                                                Shared<I>& shared) {
  constexpr int kWarps = ceil_div(I::kMTile, 32);  // with rows
  if (thread < kWarps * 32) {
    const Visibility seen = row_visibility(p, tile, thread);
    if (I::kMTile % 32 == 0 || thread < I::kMTile) shared.views[thread] = RowView::of(seen);
    const KeyBounds bounds = KeyBounds::of(seen).over_warp();
    if (thread % 32 == 0) shared.bounds[thread / 32] = bounds;
  }
  __syncthreads();
  KeyBounds bounds = shared.bounds[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) bounds = bounds.join(shared.bounds[w]);
  return bounds;
}

// Attends to KV tiles [begin, end) through a ring of stages: while one is used, later ones are in flight, and the page
// ids of the next are loaded. One barrier per stage orders its arrival and the previous one's release.
template <typename I>
__device__ __forceinline__ void attend_tiles(const AttentionParams& p, const CallShape& call, const RowTile& tile,
                                             int32_t begin, int32_t end, Shared<I>& shared, Accumulator<I>& sums) {
  constexpr int kKeys = I::kShape.keys;
  const uint32_t thread = ptx::thread_index(), warp = thread / 32;
  const int32_t key_of_thread = static_cast<int32_t>(thread), ring = call.stages;
  sums.clear();
  copy_q_tile<I>(p, call, tile, thread, shared.q);
  shared.reader.open(p, tile, tile.seq_len, thread);
  const KeyBounds bounds = find_views<I>(p, tile, thread, shared);

  const StageRange stages = StageRange::of<I>(bounds, begin, end);
#pragma unroll 1  // one pass: unrolled code costs instruction fetches
  for (int32_t i = key_of_thread; i < min_of(ring, stages.end - stages.first) * kKeys; i += I::kThreads) {
    const int32_t key = stages.first * kKeys + i;
    const auto place = static_cast<uint32_t>(i);
    const KeyReader& reader = shared.reader;
    shared.stage(place / kKeys).rows[place % kKeys] = reader.row<typename I::Kv>(p, key, reader.page(p, key));
  }
  __syncthreads();
#pragma unroll 1
  for (int s = 0; s < ring - 1; ++s) {
    if (stages.first + s < stages.end) copy_stage<I>(shared.stage(s), thread);
    ptx::cp_async_commit();
  }
  // Overlaps the first copies; the first stage's barrier orders it.
  const float factor = load_q_tile<I>(p, call, shared);

  const bool has_rows = warp % I::kShape.row_warps * I::kShape.warp_rows() < tile.rows;
  // With more than two CTAs per SM, reloads the bounds to save registers.
  const auto kept = [&] { return I::kShape.max_ctas() > 2 ? shared.bounds[0] : bounds; };
  int now = 0;  // slot of stage i
  for (int32_t i = stages.first; i < stages.end; ++i) {
    wait_for_stage(ring);
    __syncthreads();
    const int32_t first_key = i * kKeys, later_key = first_key + ring * kKeys + key_of_thread;
    const bool reads_page = thread < kKeys && i + ring < stages.end;
    const int32_t page = reads_page ? shared.reader.page(p, later_key) : -1;
    const auto start_copies = [&] {
      // Recomputes the thread index to save a register.
      if (i + ring - 1 < stages.end) copy_stage<I>(shared.stage(now == 0 ? ring - 1 : now - 1), ptx::thread_index());
      ptx::cp_async_commit();
    };

    Stage<I>& stage = shared.stage(now);
    const bool is_plain = p.softcap == 0.0f && kept().is_unmasked(first_key, kKeys);
    bool started = false;
    if (has_rows && !is_plain) {
      started = attend_stage<true, I>(p, shared, stage, thread, first_key, factor, sums, start_copies);
    } else if (has_rows) {
      started = attend_stage<false, I>(p, shared, stage, thread, first_key, factor, sums, start_copies);
    }
    if (!started) start_copies();
    if (reads_page) stage.rows[thread] = shared.reader.template row<typename I::Kv>(p, later_key, page);
    now = now + 1 == ring ? 0 : now + 1;
  }
  ptx::cp_async_wait<0>();
}

// Called by a warp. Finds a row tile that the range's record does not have; is_behind: the next one.
template <typename I>
__device__ __attribute__((noinline)) void find_row_tile(const AttentionParams& p, const CallShape& call,
                                                        RangeIterator& walk, bool is_behind) {
  if (!is_behind) walk.begin<true>(p, call, I::kMTile);
  if (ptx::thread_index() != 0 || (!is_behind && walk.is_planned())) return;
  if (walk.is_by_query() && walk.next_query(p, I::kMTile)) return;
  walk.advance(p, call, work_of<I>(call.work), is_behind);
}

// By value: a reference would move `pieces` to local memory.
__device__ inline __attribute__((noinline)) void record_own_cut(RangeIterator& walk, Pieces pieces) {
  record_cut(walk, pieces);
}

template <typename I>
__device__ __attribute__((noinline)) void join_rare_cuts(const AttentionParams& p, const CallShape& call,
                                                         Shared<I>& shared) {
  join_cuts<I>(p, call, shared.walk, shared.out(), I::kThreads, [] { __syncthreads(); });
}

// CTA i processes range i, or its part if several CTAs share the range's row tiles.
template <typename I>
__global__ void __launch_bounds__(I::kThreads, I::kShape.max_ctas())
    attention_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CallShape call) {
  static_assert(sizeof(Shared<I>) <= I::kShape.header_bytes() + I::kShape.q_bytes(), "header_bytes() is too small");
  ptx::wait_for_kernels_before();
  ptx::let_next_kernel_start();
  Shared<I>& shared = ptx::shared<Shared<I>>();
  RangeIterator& walk = shared.walk;  // in memory: accumulators fill the registers
  if (ptx::thread_index() < 32) walk.begin<false>(p, call, I::kMTile);
  __syncthreads();
  for (bool is_found = walk.is_planned();; is_found = true) {
    if (is_found) {
      const WarpParts<I> parts{shared};
      {
        Accumulator<I> sums;
        attend_tiles<I>(p, call, walk.tile, walk.at.kv_tile, walk.kv_end, shared, sums);
        __syncthreads();
        parts.store(sums);
      }
      const bool is_whole = walk.is_whole();
      if (!is_whole && ptx::thread_index() == 0) record_own_cut(walk, call.pieces);
      __syncthreads();
      const Piece piece = is_whole ? Piece{} : place_of<I>(p, call, walk.share, walk);
      const uint32_t first_row = walk.is_by_query() && call.work.segment == 0 ? walk.tile.first_row % I::kMTile : 0;
      const bool is_poisoned =
          join<I>(parts, walk.tile.rows, is_whole, ToOutput<typename I::T>{p, walk.tile, call.out_aligned},
                  ToPiece{piece, I::kHeadDimV, first_row});
      // A vote makes the value warp-uniform for the compiler.
      const bool again = __any_sync(kWholeWarp, __syncthreads_or(is_poisoned && !walk.is_by_query()));
      if (!again && !walk.has_more && !walk.is_by_query()) break;
      if (again && ptx::thread_index() == 0) walk.order.count = -1;
    }
    __syncthreads();
    if (ptx::thread_index() < 32) find_row_tile<I>(p, call, walk, is_found);
    __syncthreads();
    if (walk.tile.rows == 0) break;
  }
  join_rare_cuts<I>(p, call, shared);
  if (has_padding(p)) clear_rare_padding<I>(p, walk.share.cta);
}

template <typename I>
void launch_attention(const AttentionParams& p, const CallShape& call, unsigned grid, int shared_bytes, void* stream) {
  launch_behind(attention_kernel<I>, dim3(grid), dim3(I::kThreads), static_cast<size_t>(shared_bytes), stream, p, call);
}

}  // namespace pagedtree::cuda
