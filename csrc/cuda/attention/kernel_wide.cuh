// Attention kernel for wide values (512 columns).
#pragma once

#include "cuda/attention/attend_wide.cuh"
#include "cuda/attention/instances.cuh"
#include "cuda/attention/kernel.cuh"

namespace pagedtree::cuda {

// Attends to KV tiles [begin, end). Three barriers per 32 keys: K has arrived; maxima are known; P and V have arrived.
template <typename I>
  requires(I::kShape.is_wide())
__device__ __forceinline__ void attend_tiles(const AttentionParams& p, const CallShape& call, const RowTile& tile,
                                             int32_t begin, int32_t end, Shared<I>& shared, Accumulator<I>& sums) {
  sums.clear();
  const uint32_t thread = ptx::thread_index();
  copy_q_tile<I>(p, call, tile, thread, shared.q);
  if (thread < 32) {
    KeyBounds bounds = KeyBounds::none();
    if (thread < tile.rows) bounds = KeyBounds::of(row_visibility(p, tile, thread));
    bounds = bounds.over_warp();
    if (thread == 0) shared.bounds = bounds;
    shared.reader.open(p, tile, tile.seq_len, thread);
  }
  __syncthreads();

  const StageRange stages = StageRange::of<I>(shared.bounds, begin, end);
  WideRing<I> ring(p, shared, call.stages, stages);
  for (int s = 0; s < call.stages - 1; ++s) ring.start();
  const float factor = load_q_tile<I>(p, call, shared);
  for (int32_t i = stages.first; i < stages.end; ++i) {
    const uint32_t keys = ring.wait();
    Scores<I> scores;
    score_wide_keys<I>(p, shared, keys, scores);
    ring.start();
    RowFactors<I> rescales;
    if (softmax_wide_keys<I>(p, shared, i * I::kShape.keys, factor, scores, sums, rescales)) rescale<I>(sums, rescales);
    uint32_t values = keys;
    if (p.latent) {
      __syncthreads();
    } else {
      values = ring.wait();
      ring.start();
    }
    add_wide_values<I>(shared, values, sums);
  }
  ptx::cp_async_wait<0>();
}

template <typename T, typename Kv>
AttentionLauncher mma_sync_launcher(const TileShape& shape) {
  return find_launcher<MatrixEngine::kMmaSync>(shape, [&]<int kHeadDim, int kMTile, int kHeadDimV>() {
    return launch_attention<Instance<T, Kv, kHeadDim, kMTile, kHeadDimV>>;
  });
}

}  // namespace pagedtree::cuda
