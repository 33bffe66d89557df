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
// registers. A warp's `tile` is in shared memory, and Walk::advance() would take more registers than producers have.
template <typename I, typename Work>
__device__ __forceinline__ void for_each_row_tile(const AttentionParams& p, const CallShape& call,
                                                  const Sm90Shared<I>& shared, RowTile& tile, const Work& work) {
  const Walk& range = shared.walk;
  WorkPosition at = range.at;
  bool has_work = range.tile.rows > 0;
  if (ptx::thread_index() % 32 == 0) tile = range.tile;
  while (true) {
    __syncwarp();
    if (has_work) {
      at = work(at, tile);
      if (!range.has_more) return;
    }
    if (!at.before(range.stop)) return;
    const SequenceWork sequence = sequence_work(work_of<I>(call.work), at.sequence, range.share.sharers);
    const bool is_behind = has_work;
    has_work = false;
    if (!is_behind && at.row_tile < sequence.row_tiles) {
      const RowTile found = row_tile(p, sequence, at.sequence, at.row_tile, I::kMTile, range.share.part());
      __syncwarp();
      if (ptx::thread_index() % 32 == 0) tile = found;
      has_work = found.rows > 0;
    }
    if (!has_work) at = at.next(sequence.row_tiles);  // a sequence without any may lie between two others
  }
}

template <typename I>
__device__ __forceinline__ void consume_range(const AttentionParams& p, const CallShape& call, const CacheMaps& maps,
                                              Sm90Shared<I>& shared) {
  std::conditional_t<I::kLatent, LatentConsumer<I>, Consumer<I>> consumer(p, call, maps, shared);
  const auto meet = [] { ptx::barrier_sync(kJoinersMeet, I::kConsumers); };
  Walk& walk = shared.walk;
  RowTile& own = shared.warps[ptx::thread_index() / 32].tile;
  for_each_row_tile(p, call, shared, own, [&](const WorkPosition& begin, const RowTile& of_rows) {
    const auto is_whole = [&](const WorkPosition& at, const RowTile& tile) {
      return at.kv_tile == 0 && kv_end_of(tile, at, walk.stop) == tile.kv_tiles();
    };
    // While accumulators do not fill the registers yet.
    if (ptx::thread_index() == 0 && !is_whole(begin, of_rows)) {
      const bool is_planned = walk.tile.rows > 0 && begin.same_row(walk.at);
      note_cut(walk, call.pieces, begin, of_rows,
               is_planned ? walk.order : order_of(walk, call.pieces, begin, of_rows));
    }
    Accumulator<I> sums;
    consumer.attend(begin, of_rows, kv_end_of(of_rows, begin, walk.stop), sums);
    const auto& [at, tile, bounds] = consumer.current();
    if (is_whole(at, tile)) {
      store_rows<I>(sums, consumer.row(), consumer.column(), tile.rows,
                    ToOutput<typename I::T>{p, tile, call.out_aligned});
    } else {
      meet();
      store_rows<I>(sums, consumer.row(), consumer.column(), tile.rows,
                    ToPiece{pieces_of<I>(call).of(walk.share, at.kv_tile == 0), I::kHeadDimV});
    }
    return at;
  });
  consumer.finish();
  join_cuts<I>(p, call, walk, shared.q(0), I::kConsumers, meet);
}

template <typename I>
__device__ __forceinline__ void produce_range(const AttentionParams& p, const CallShape& call, const CacheMaps& maps,
                                              Sm90Shared<I>& shared) {
  Producer<I> producer(p, maps, call.stages, shared);
  RowTile& own = shared.tiles[(ptx::thread_index() - I::kConsumers) / 32];
  for_each_row_tile(p, call, shared, own, [&](const WorkPosition& at, const RowTile& tile) {
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
  Walk& walk = shared.walk;
  if (threadIdx.x == 0) {
    walk.begin(p, call, I::kMTile);
    shared.init_barriers(call.stages);
  }
  __syncthreads();
  const bool is_current = walk.is_current(call.work);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (!is_current || walk.has_more) walk.find(p, call);
    if (is_current) {
      walk.tile.tree_len = tree_length(p, walk.tile.sequence, walk.tile.num_queries, walk.tile.seq_len);
    } else {
      walk.tile.rows = 0;
    }
  }
  __syncthreads();
  if (ptx::thread_index() < I::kConsumers) {
    ptx::setmaxnreg_inc<I::kConsumerRegisters>();
    consume_range<I>(p, call, maps, shared);
    if (has_padding(p)) clear_padding<I>(p, walk.share.cta, I::kConsumers);
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
