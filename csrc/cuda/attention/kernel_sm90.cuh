// Hopper's attention kernel: each CTA takes one range of the plan, row tile by row tile, as in kernel.cuh. Four warps
// fill a ring of stages; the others, in groups of four, multiply what it brings by wgmma. The two sides part at the
// start and walk through the range each on its own, so that the keys of the next row tile arrive while the output of
// the last one is written.
#pragma once

#include "cuda/attention/attend_latent_sm90.cuh"
#include "cuda/attention/attend_sm90.cuh"
#include "cuda/attention/output.cuh"
#include "cuda/attention/ranges.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {

// One past the last KV tile of the row tile at `at` that belongs to a range which ends at `stop`.
__device__ __forceinline__ int32_t kv_end_of(const RowTile& tile, const WorkPosition& at, const WorkPosition& stop) {
  return at.same_row(stop) ? stop.kv_tile : tile.kv_tiles();
}

// Calls work(at, tile) for each row tile of the CTA's range; it returns `at`, which it may have kept elsewhere than in
// registers.
template <typename I, typename Work>
__device__ __forceinline__ void for_each_row_tile(const TreeAttentionParams& p, const WorkShape& shape,
                                                  const Sm90Shared<I>& shared, const Work& work) {
  WorkPosition at = shared.start;
  while (at.before(shared.stop)) {
    const auto find_work = [&] { return sequence_work(shape, at.sequence, shared.share.sharers); };
    const SequenceWork sequence = find_work();
    // A sequence without row tiles may lie between two others.
    if (at.row_tile < sequence.row_tiles) {
      const RowTile tile = row_tile(p, sequence, at.sequence, at.row_tile, I::kMTile, shared.share.part());
      if (tile.rows > 0) at = work(at, tile);
    }
    const bool is_last = at.row_tile + 1 >= find_work().row_tiles;
    at = is_last ? WorkPosition{at.sequence + 1, 0, 0} : WorkPosition{at.sequence, at.row_tile + 1, 0};
  }
}

template <typename I>
__device__ __forceinline__ void consume_range(const TreeAttentionParams& p, const CallShape& call,
                                              const CacheMaps& maps, Sm90Shared<I>& shared) {
  std::conditional_t<I::kLatent, LatentConsumer<I>, Consumer<I>> consumer(p, call, maps, shared);
  for_each_row_tile(p, call.work, shared, [&](const WorkPosition& begin, const RowTile& of_rows) {
    Accumulator<I> sums;
    consumer.attend(begin, of_rows, kv_end_of(of_rows, begin, shared.stop), sums);
    const auto& [at, tile, bounds] = consumer.current();
    if (at.kv_tile == 0 && kv_end_of(tile, at, shared.stop) == tile.kv_tiles()) {
      store_rows<I>(sums, consumer.row(), consumer.column(), tile.rows,
                    ToOutput<typename I::T>{p, tile, call.out_aligned});
    } else {
      tell_cut(call.pieces, shared.share.cta, at, tile);
      store_rows<I>(sums, consumer.row(), consumer.column(), tile.rows,
                    ToPiece{call.pieces.of(shared.share.cta, at.kv_tile == 0), I::kHeadDimV});
    }
    return at;
  });
  consumer.finish();
}

template <typename I>
__device__ __forceinline__ void produce_range(const TreeAttentionParams& p, const CallShape& call,
                                              const CacheMaps& maps, Sm90Shared<I>& shared) {
  Producer<I> producer(p, maps, call.stages, shared);
  for_each_row_tile(p, call.work, shared, [&](const WorkPosition& at, const RowTile& tile) {
    producer.produce(tile, at.kv_tile, kv_end_of(tile, at, shared.stop));
    return at;
  });
  producer.finish();
}

// CTA i works on range i, or where several CTAs share a range's row tiles, on its part of one.
template <typename I>
__global__ void __launch_bounds__(I::kThreads, I::kShape.max_ctas())
    attention_sm90_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ CallShape call,
                          const __grid_constant__ CacheMaps maps) {
  static_assert(sizeof(Sm90Shared<I>) <= I::kShape.header_bytes(), "header_bytes() is too small");
  ptx::wait_for_kernels_before();
  ptx::let_next_kernel_start();
  Sm90Shared<I>& shared = ptx::shared<Sm90Shared<I>>();
  const CallRanges ranges(call.work, p.plan, call.pieces.capacity);
  ranges.find(shared.start, shared.stop, shared.share, call.pieces.records());
  if (threadIdx.x == 0) shared.init_barriers(call.stages);
  __syncthreads();
  if (shared.start.kv_tile > 0 && !shared.start.before(shared.stop)) {
    clear_piece(call.pieces.of(shared.share.cta, false), I::kMTile);
  }
  clear_padding<I>(p, call.work, shared.share.cta);
  if (ptx::thread_index() < I::kConsumers) {
    ptx::setmaxnreg_inc<I::kConsumerRegisters>();
    consume_range<I>(p, call, maps, shared);
  } else {
    ptx::setmaxnreg_dec<I::kProducerRegisters>();
    produce_range<I>(p, call, maps, shared);
  }
}

template <typename I>
void launch_attention_sm90(const TreeAttentionParams& p, const CallShape& call, unsigned grid, int shared_bytes,
                           void* stream) {
  launch_behind(attention_sm90_kernel<I>, dim3(grid), dim3(I::kThreads), static_cast<size_t>(shared_bytes), stream, p,
                call, CacheMaps::of<I>(p));
}

}  // namespace pagedtree::cuda
