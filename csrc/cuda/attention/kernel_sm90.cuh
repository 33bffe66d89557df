// Hopper: split-KV attention with wgmma. A CTA processes a kv range, row tile by row tile. Four producer warps iterate
// over it, fill a ring of stages, and publish work tiles with Q. Consumer warpgroups multiply; the next work tile
// arrives during the epilogue of the last.
#pragma once

#include "cuda/attention/attend_latent_sm90.cuh"
#include "cuda/attention/attend_sm90.cuh"
#include "cuda/attention/instances.cuh"
#include "cuda/attention/join.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {

template <typename I>
__device__ __forceinline__ void consume_range(const AttentionParams& p, const CallShape& call, const CacheMaps& maps,
                                              Sm90Shared<I>& shared) {
  std::conditional_t<I::kLatent, LatentConsumer<I>, Consumer<I>> consumer(p, call, maps, shared);
  const auto meet = [] { ptx::barrier_sync(kJoinersMeet, I::kConsumers); };
  for (bool by_query = false;; by_query = true) {
    while (const WorkTile* given = consumer.acquire()) {
      Accumulator<I> sums;
      consumer.attend(*given, sums);
      trace<I>(shared, kOutputBegins);
      const RowTile& tile = given->tile;
      const RowSpan rows = given->counted;
      const float totals[2] = {quad_sum(sums.sum[0][0]), quad_sum(sums.sum[0][1])};
      const bool poisoned = __any_sync(kWholeWarp, consumer.row() < tile.rows && is_poisoned<I>(sums, totals));
      if (poisoned && ptx::thread_index() % 32 == 0) atomicMax(&shared.is_poisoned, 1u);
      if (given->is_whole()) {
        store_rows<I>(sums, totals, consumer.row(), consumer.column(), rows,
                      ToOutput<typename I::T>{p, tile, call.out_aligned});
      } else {
        store_rows<I>(sums, totals, consumer.row(), consumer.column(), rows,
                      ToPiece{place_of<I>(p, call, shared.walks[0].share, *given), I::kHeadDimV});
      }
      trace<I>(shared, kOutputEnds);
    }
    ptx::barrier_sync(kAllMeet, I::kThreads);
    if (by_query || !__any_sync(kWholeWarp, shared.is_poisoned)) break;
  }
  consumer.finish();
  join_cuts<I>(p, call, shared.walks[0], shared.q(0), I::kConsumers, meet);
  trace<I>(shared, kJoined);
}

// Each producer warp iterates separately. If a row tile is poisoned (see join()), all repeat the range query by query.
// Row tiles stay the same, as stages begin at the first key visible to a row.
template <typename I>
__device__ __forceinline__ void produce_range(const AttentionParams& p, const CallShape& call, const CacheMaps& maps,
                                              Sm90Shared<I>& shared) {
  Producer<I> producer(p, call, maps, shared);
  // Recomputed to save a register.
  const auto own = [&]() -> RangeIterator& { return shared.walks[(ptx::thread_index() - I::kConsumers) / 32]; };
  TreeWindows windows;  // computed after produce(): rare
  for (bool is_found = own().is_planned() && !own().tile.has_windows(p);; is_found = true) {
    if (is_found) {
      producer.produce(own(), windows);
      if (own().tile.rows == 0) {
        ptx::barrier_sync(kAllMeet, I::kThreads);
        if (producer.by_query || !__any_sync(kWholeWarp, shared.is_poisoned)) break;
        producer.by_query = true;
        if (ptx::thread_index() % 32 == 0) own().has_more = 1;
        producer.use_up_end();
      }
    }
    trace<I>(shared, kNextTileBegins);
    __syncwarp();
    if (ptx::thread_index() % 32 == 0 && (is_found || !own().is_planned())) {
      RangeIterator& walk = own();
      RowSpan& counted = shared.counted[(ptx::thread_index() - I::kConsumers) / 32];
      if (!producer.by_query || counted.end == walk.tile.rows) {
        if (walk.has_more) walk.advance(p, call, work_of<I>(call.work), is_found && walk.tile.rows > 0);
        if (!walk.has_more || walk.tile.rows == 0) static_cast<RowPiece&>(walk) = {};  // the end marker has no keys
        counted.end = 0;
      }
      if (producer.by_query) counted = walk.tile.rows_of_query(p, counted.end);
    }
    __syncwarp();
    trace<I>(shared, kNextTileEnds);
    if (own().tile.has_windows(p)) windows.find(p, own().tile, ptx::thread_index() - I::kConsumers);
  }
  producer.finish();
}

template <typename I>
__global__ void __launch_bounds__(I::kThreads, I::kShape.max_ctas())
    attention_sm90_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CallShape call,
                          const __grid_constant__ CacheMaps maps) {
  static_assert(sizeof(Sm90Shared<I>) <= I::kShape.header_bytes(), "header_bytes() is too small");
  ptx::wait_for_kernels_before();
  ptx::let_next_kernel_start();
  Sm90Shared<I>& shared = ptx::shared<Sm90Shared<I>>();
  if (ptx::thread_index() < I::kConsumers) {
    if (threadIdx.x == 0) shared.init_barriers(call.stages);
    ptx::barrier_sync(kAllMeet, I::kThreads);
    ptx::setmaxnreg_inc<I::kConsumerRegisters>();
    consume_range<I>(p, call, maps, shared);
    if (has_padding(p)) clear_padding<I>(p, shared.walks[0].share.cta, I::kConsumers);
  } else {
    shared.walks[(ptx::thread_index() - I::kConsumers) / 32].template begin<true>(p, call, I::kMTile);
    ptx::barrier_sync(kAllMeet, I::kThreads);
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
