// Hopper's attention kernel: each CTA takes one range of the plan, row tile by row tile, as in kernel.cuh. Four warps
// fill a ring of stages; the others, in groups of four, multiply what it brings by wgmma. The two sides part at the
// start and walk through the range each on its own, so that the keys of the next row tile arrive while the output of
// the last one is written.
#pragma once

#include "cuda/attention/attend_latent_sm90.cuh"
#include "cuda/attention/attend_sm90.cuh"
#include "cuda/attention/instances.cuh"
#include "cuda/attention/join.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {

// One past the last KV tile of the row tile at `at` that belongs to a range which ends at `stop`.
__device__ __forceinline__ int32_t kv_end_of(const RowTile& tile, const WorkPosition& at, const WorkPosition& stop) {
  return at.same_row(stop) ? stop.kv_tile : tile.kv_tiles();
}

// Calls work(at, tile) for each row tile of the CTA's range; it returns `at`, which it may have kept elsewhere than in
// registers. Walk::advance() would take more registers than producers have.
template <typename I, typename Work>
__device__ __forceinline__ void for_each_row_tile(const AttentionParams& p, const CallShape& call,
                                                  const Sm90Shared<I>& shared, const Work& work) {
  const WorkShape shape = work_of<I>(call.work);
  const Walk& range = shared.walk;
  for (WorkPosition at = range.at; at.before(range.stop);) {
    const auto find_work = [&] { return sequence_work(shape, at.sequence, range.share.sharers); };
    const SequenceWork sequence = find_work();
    // A sequence without row tiles may lie between two others.
    if (at.row_tile < sequence.row_tiles) {
      const RowTile tile = row_tile(p, sequence, at.sequence, at.row_tile, I::kMTile, range.share.part());
      if (tile.rows > 0) at = work(at, tile);
    }
    at = at.next(find_work().row_tiles);
  }
}

template <typename I>
__device__ __forceinline__ void consume_range(const AttentionParams& p, const CallShape& call, const CacheMaps& maps,
                                              Sm90Shared<I>& shared) {
  std::conditional_t<I::kLatent, LatentConsumer<I>, Consumer<I>> consumer(p, call, maps, shared);
  const auto meet = [] { ptx::barrier_sync(kJoinersMeet, I::kConsumers); };
  for_each_row_tile(p, call, shared, [&](const WorkPosition& begin, const RowTile& of_rows) {
    const auto is_whole = [&](const WorkPosition& at, const RowTile& tile) {
      return at.kv_tile == 0 && kv_end_of(tile, at, shared.walk.stop) == tile.kv_tiles();
    };
    // While accumulators do not fill the registers yet.
    if (ptx::thread_index() == 0 && !is_whole(begin, of_rows)) {
      note_cut(shared.walk, call.pieces, begin, of_rows,
               order_of(shared.walk, call.pieces, begin, of_rows.kv_tiles()));
    }
    Accumulator<I> sums;
    consumer.attend(begin, of_rows, kv_end_of(of_rows, begin, shared.walk.stop), sums);
    const auto& [at, tile, bounds] = consumer.current();
    if (is_whole(at, tile)) {
      store_rows<I>(sums, consumer.row(), consumer.column(), tile.rows,
                    ToOutput<typename I::T>{p, tile, call.out_aligned});
    } else {
      meet();
      store_rows<I>(sums, consumer.row(), consumer.column(), tile.rows,
                    ToPiece{pieces_of<I>(call).of(shared.walk.share, at.kv_tile == 0), I::kHeadDimV});
    }
    return at;
  });
  consumer.finish();
  join_cuts<I>(p, call, shared.walk, I::kConsumers, meet);
}

template <typename I>
__device__ __forceinline__ void produce_range(const AttentionParams& p, const CallShape& call, const CacheMaps& maps,
                                              Sm90Shared<I>& shared) {
  Producer<I> producer(p, maps, call.stages, shared);
  for_each_row_tile(p, call, shared, [&](const WorkPosition& at, const RowTile& tile) {
    producer.produce(tile, at.kv_tile, kv_end_of(tile, at, shared.walk.stop));
    return at;
  });
  producer.finish();
}

// CTA i works on range i, or where several CTAs share a range's row tiles, on its part of one.
template <typename I>
__global__ void __launch_bounds__(I::kThreads, I::kShape.max_ctas())
    attention_sm90_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CallShape call,
                          const __grid_constant__ CacheMaps maps) {
  static_assert(sizeof(Sm90Shared<I>) <= I::kShape.header_bytes(), "header_bytes() is too small");
  ptx::wait_for_kernels_before();
  ptx::let_next_kernel_start();
  Sm90Shared<I>& shared = ptx::shared<Sm90Shared<I>>();
  if (threadIdx.x == 0) {
    shared.walk.begin(p, call, I::kMTile);
    shared.walk.find(p, call, work_of<I>(call.work));
    shared.init_barriers(call.stages);
  }
  __syncthreads();
  if (has_padding(p)) clear_padding<I>(p, static_cast<int32_t>(blockIdx.x));
  if (ptx::thread_index() < I::kConsumers) {
    ptx::setmaxnreg_inc<I::kConsumerRegisters>();
    consume_range<I>(p, call, maps, shared);
  } else {
    ptx::setmaxnreg_dec<I::kProducerRegisters>();
    produce_range<I>(p, call, maps, shared);
  }
}

template <typename I>
void launch_attention_sm90(const AttentionParams& p, const CallShape& call, unsigned grid, int shared_bytes,
                           void* stream) {
  launch_behind(attention_sm90_kernel<I>, dim3(grid), dim3(I::kThreads), static_cast<size_t>(shared_bytes), stream, p,
                call, CacheMaps::of<I>(p));
}

template <typename T, typename Kv>
AttentionLauncher wgmma_launcher(const TileShape& shape) {
  const auto make = [&]<int kHeadDim, int kMTile, int kHeadDimV>() -> AttentionLauncher {
    return launch_attention_sm90<Sm90Instance<T, Kv, kHeadDim, kMTile, kHeadDimV>>;
  };
  return find_launcher<MatrixEngine::kWgmma>(shape, make);
}

}  // namespace pagedtree::cuda
