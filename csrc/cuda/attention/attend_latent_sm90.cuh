// Hopper, MLA: 64 rows against latent stages, which are keys and, without their last columns, values. Two groups of
// four warps share the rows. Each computes S of alternate stages, exchanges P, and accumulates half of the columns over
// all stages: each stage is read once, and 512 output columns fit in registers (FlashMLA's division and order).
//   group 0: S0  P0           publish max             | O += P0 V0  acquire P1, publish P0 | O += P1 V1
//   group 1: S1  acquire max  P1, publish P1 with max | O += P1 V1  acquire P0             | O += P0 V0
// One group's exponentials overlap the other's products. Maxima flow one way: group 1's cover both stages.
#pragma once

#include "cuda/attention/attend_sm90.cuh"

namespace pagedtree::cuda {

// Consumer of a ring of latent stages.
template <typename I>
class LatentConsumer : public ConsumerBase<I> {
  using Base = ConsumerBase<I>;
  using Base::adjust_q, Base::release_q, Base::wait_for, Base::release;
  using Base::p_, Base::call_, Base::maps_, Base::shared_, Base::place_;

 public:
  __device__ __forceinline__ LatentConsumer(const AttentionParams& params, const CallShape& call, const CacheMaps& maps,
                                            Sm90Shared<I>& of_cta)
      : Base(params, call, maps, of_cta), group_(group_of_warp()) {}
  __device__ __forceinline__ void finish() {}

  // The warp's first row and column.
  __device__ __forceinline__ uint32_t row() const { return ptx::thread_index() / 32 % 4 * 16; }
  __device__ __forceinline__ uint32_t column() const { return group_ * I::kWarpColumns; }

  __device__ __forceinline__ void attend(const WorkTile& given, Accumulator<I>& sums) {
    const RowTile& tile = given.tile;
    const KeyBounds& bounds = given.bounds;
    const StageRange stages = given.stages<I>();
    sums.clear();
    if (stages.first >= stages.end) return release_q();
    const auto is_plain = [&](int32_t stage) { return bounds.is_unmasked(stage * I::kShape.keys, I::kShape.keys); };
    RowFactors<I> row_factors;
    meet();  // the previous rows' sums have been exchanged
    adjust_q(tile, row(), group_, shared_.q(0), meet, row_factors);

    Scores<I> scores;
    for (int32_t first = stages.first; first < stages.end; first += 2) {
      const bool has_second = first + 1 < stages.end;
      // Without a second stage, group 1 recomputes the first one's S and masks it.
      const bool is_second = group_ == 1 && has_second;
      const int32_t own = first + is_second;
      const RingPlace mine = is_second ? next_place() : place_;
      const bool plain = is_plain(own);
#pragma unroll 1  // limits the descriptors in registers
      for (int part = 0; part < 2; ++part) start_scores<I::kPartPanels>(scores, mine, part, plain);
      if (p_.head_dim == I::kHeadDim) start_scores<1>(scores, mine, 2, plain);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(scores[0]);
      const bool hides = group_ == 1 && !has_second;
      if (group_ == 0 && has_second) release_scores(mine);
      if (!plain || hides) mask(tile, own, hides, scores);
      if (first + 2 >= stages.end) release_q();

      RowFactors<I> tops, raised, rescales, factors = {{row_factors[0][0], row_factors[0][1]}};
      find_tops<I>(scores, tops);
      bool changed = false;
      if (group_ == 1) {
        changed = acquire_maxima(kMaximaReady, sums, raised);
        release_scores(mine);  // group 0's scores are complete as well
      }
      changed = softmax<I>(scores, tops, factors, sums, rescales) || changed;
      publish_maxima(sums);
      if (group_ == 0) ptx::barrier_arrive(kMaximaReady, I::kConsumers);
      WeightFragments<I> weights, others;
      pack_weights<I>(scores, weights);
      if (group_ == 1) {
        publish_weights(scores);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) rescales[0][half] *= raised[0][half];
      }
      if (hides) acquire_weights(weights);
      // Own P and stage first, then the other group's.
#pragma unroll 1
      for (bool of_other = hides;; of_other = true) {
        const RingPlace at = (group_ == 0) == of_other ? next_place() : place_;
        if (changed) rescale<I>(sums, rescales);
        wait_for(at, static_cast<int>(group_), is_plain(first + ((group_ == 0) == of_other)));
        start_values<I>(sums, weights, stage_of(at) + column() / 64 * I::kPanelStep);
        if (!of_other) changed = exchange(scores, others, sums, rescales);
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(sums.out[0]);
        release(at.stage, static_cast<int>(group_));
        if (of_other || !has_second) break;
#pragma unroll
        for (uint32_t n = 0; n < I::kShape.keys / 16; ++n) {
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i) weights[n][i] = others[n][i];
        }
      }
      place_.advance(call_.stages);
      if (has_second) place_.advance(call_.stages);
    }
    share_sums(sums);
  }

 private:
  __device__ __forceinline__ static void meet() { ptx::barrier_sync(kGroupsMeet, I::kConsumers); }
  __device__ __forceinline__ RingPlace next_place() const {
    RingPlace place = place_;
    place.advance(call_.stages);
    return place;
  }

  // Issues S (+)= Q K^T of a part once it has arrived.
  template <int kPanels>
  __device__ __forceinline__ void start_scores(Scores<I>& scores, const RingPlace& place, int part, bool plain) {
    constexpr uint32_t kPanel = I::kPanelStep / 16;
    wait_for(place, part, plain);
    const int first = part * I::kPartPanels;
    const uint64_t keys = ptx::matrix_descriptor(stage_of(place) + first * I::kPanelStep, 16, kEightRows);
    const uint64_t rows = ptx::matrix_descriptor(shared_.q(0) + first * kQPanelBytes, 16, kEightRows);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < kPanels * 4; ++step) {
      const uint32_t at = step / 4 * kPanel + step % 4 * 2;
      ptx::wgmma_ss<typename I::M, I::kShape.keys>(scores[0], rows + at, keys + at, part > 0 || step > 0);
    }
  }
  // Broadcast, for descriptors in uniform registers.
  __device__ __forceinline__ unsigned char* stage_of(const RingPlace& place) const {
    return shared_.stage(__shfl_sync(kWholeWarp, place.stage, 0));
  }
  // Releases the key part of a stage: by both groups if there is no second stage.
  __device__ __forceinline__ void release_scores(const RingPlace& place) {
    __syncwarp();
    const uint32_t lane = ptx::thread_index() % 32;
    if (lane < I::kParts) ptx::mbar_arrive(&shared_.empty[place.stage][lane]);
  }
  __device__ __forceinline__ void mask(const RowTile& tile, int32_t stage, bool hides_all, Scores<I>& scores) const {
    const uint32_t reader = ptx::thread_index() % 32, own = row() + own_row(reader);
    const Visibility seen = tile.visibility(p_, own, shared_.row_windows[0][own]);
    VisibleKeys<I::kWords> keys = visible_keys<I::kWords>(seen, reader, stage * I::kShape.keys);
    if (hides_all) keys.hide_from(0);
    mask_scores(scores[0], keys, reader);
  }

  __device__ __forceinline__ float& of_row(uint32_t group, uint32_t half) const {
    return shared_.of_rows[group][row() + half * 8 + ptx::thread_index() % 32 / 4];
  }
  __device__ __forceinline__ void publish_maxima(const Accumulator<I>& sums) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (ptx::thread_index() % 4 == 0) of_row(group_, half) = sums.maximum[0][half];
    }
  }
  // Acquires the other group's maxima and the `factors` that rescale P and O. Returns true if one of the warp changed.
  __device__ __forceinline__ bool acquire_maxima(unsigned barrier, Accumulator<I>& sums, RowFactors<I>& factors) const {
    ptx::barrier_sync(barrier, I::kConsumers);
    bool changed = false;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const float old = sums.maximum[0][half], raised = of_row(1 - group_, half);
      factors[0][half] = ptx::ex2(old - (raised == -kInfinity ? 0.0f : raised));
      sums.maximum[0][half] = raised;
      sums.sum[0][half] *= factors[0][half];
      changed = changed || raised != old;
    }
    return __any_sync(kWholeWarp, changed);
  }

  // Groups exchange P through a buffer for one of them. Threads of both groups have the same fragments, so that each
  // pair owns a slot: group 1 writes, group 0 reads and overwrites it.
  __device__ __forceinline__ void publish_weights(const Scores<I>& scores) const {
    uint4* const to = shared_.weights() + ptx::thread_index() % 128;
#pragma unroll
    for (uint32_t n = 0; n < I::kShape.keys / 16; ++n) {
      uint32_t fragment[4];
      pack_weights<typename I::M>(scores[0], n * 2, fragment);
      to[n * 128] = make_uint4(fragment[0], fragment[1], fragment[2], fragment[3]);
    }
    ptx::barrier_arrive(kWeightsReady + 1 - group_, I::kConsumers);
  }
  // Acquires the other group's P; group 0 also its maxima, and publishes P under them. Returns true to rescale `out`.
  __device__ __forceinline__ bool exchange(Scores<I>& scores, WeightFragments<I>& others, Accumulator<I>& sums,
                                           RowFactors<I>& rescales) const {
    if (group_ == 1) {
      acquire_weights(others);
      return false;
    }
    const bool changed = acquire_maxima(kWeightsReady, sums, rescales);
    read_weights(others);
#pragma unroll
    for (uint32_t n = 0; n < I::kWarpKeys / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) scores[0][n][i] *= changed ? rescales[0][i / 2] : 1.0f;
    }
    publish_weights(scores);
    return changed;
  }
  __device__ __forceinline__ void acquire_weights(WeightFragments<I>& weights) const {
    ptx::barrier_sync(kWeightsReady + 1, I::kConsumers);
    read_weights(weights);
  }
  __device__ __forceinline__ void read_weights(WeightFragments<I>& weights) const {
    const uint4* const from = shared_.weights() + ptx::thread_index() % 128;
#pragma unroll
    for (uint32_t n = 0; n < I::kShape.keys / 16; ++n) {
      const uint4 fragment = from[n * 128];
      weights[n][0] = fragment.x;
      weights[n][1] = fragment.y;
      weights[n][2] = fragment.z;
      weights[n][3] = fragment.w;
    }
  }

  // Sums both groups: a row's first lane has the total, the other lanes 0.
  __device__ __forceinline__ void share_sums(Accumulator<I>& sums) const {
    const uint32_t lane = ptx::thread_index() % 32;
    float own[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      own[half] = quad_sum(sums.sum[0][half]);
      if (lane % 4 == 0) shared_.of_rows[group_][row() + half * 8 + lane / 4] = own[half];
    }
    meet();
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const float other = shared_.of_rows[1 - group_][row() + half * 8 + lane / 4];
      sums.sum[0][half] = lane % 4 == 0 ? own[half] + other : 0.0f;
    }
  }

  uint32_t group_;
};

}  // namespace pagedtree::cuda
