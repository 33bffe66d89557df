// Hopper: 64 rows against latent stages, whose rows are keys and, but for their last columns, values. Two groups of
// four warps have the same rows. Each computes the scores of every other stage, they give each other their weights, and
// each accumulates half of the columns over all stages: so every stage is read from memory once, and the output of 512
// columns fits the registers (FlashMLA's division of the work).
#pragma once

#include "cuda/attention/attend_sm90.cuh"

namespace pagedtree::cuda {

// The multiplying side of a ring of latent stages.
template <typename I>
class LatentConsumer : public ConsumerBase<I> {
  using Base = ConsumerBase<I>;
  using Base::adjust_q, Base::give_back, Base::wait_for, Base::release;
  using Base::p_, Base::call_, Base::maps_, Base::shared_, Base::place_;

 public:
  __device__ __forceinline__ LatentConsumer(const AttentionParams& params, const CallShape& call, const CacheMaps& maps,
                                            Sm90Shared<I>& of_cta)
      : Base(params, call, maps, of_cta), group_(group_of_warp()) {}
  __device__ __forceinline__ void finish() {}

  // The warp's first row in the tile, and its first column.
  __device__ __forceinline__ uint32_t row() const { return ptx::thread_index() / 32 % 4 * 16; }
  __device__ __forceinline__ uint32_t column() const { return group_ * I::kWarpColumns; }

  // Computes the warp's rows against the given KV tiles.
  __device__ __forceinline__ void attend(const GivenTile& given, Accumulator<I>& sums) {
    const RowTile& tile = given.tile;
    const KeyBounds& bounds = given.bounds;
    const StageRange stages = given.stages<I>();
    sums.clear();
    if (stages.first >= stages.end) return give_back();
    const auto is_plain = [&](int32_t stage) { return bounds.all_see(stage * I::kShape.keys, I::kShape.keys); };
    RowFactors<I> row_factors;
    meet();  // the sums of the rows before are shared
    adjust_q(tile, row(), group_, shared_.q(0), meet, row_factors);

    for (int32_t first = stages.first; first < stages.end; first += 2) {
      const bool has_second = first + 1 < stages.end;
      // Where there is no second stage, its group computes scores of the first, which do not count.
      const bool is_second = group_ == 1 && has_second;
      const int32_t mine = first + is_second;
      const bool plain = is_plain(mine);
      Scores<I> scores;
      start_scores(scores, is_second ? next_place() : place_, plain);
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(scores[0]);
      if (!plain) {
        const uint32_t reader = ptx::thread_index() % 32;
        const uint32_t own = row() + own_row(reader);
        const Visibility seen = tile.visibility(p_, own, shared_.given_rows[own]);
        mask_scores(scores[0], visible_keys<I::kWords>(seen, reader, mine * I::kShape.keys), reader);
      }
      if (first + 2 >= stages.end) give_back();
      if (group_ == 1 && !has_second) hide_all(scores);
      RowFactors<I> tops, rescales, factors = {{row_factors[0][0], row_factors[0][1]}};
      find_tops<I>(scores, tops);
      share_tops(tops);
      const bool changed = weigh<I>(scores, tops, factors, sums, rescales);
      WeightFragments<I> weights;
      give_weights(scores, weights);
      if (changed) rescale<I>(sums, rescales);
      use_values(sums, weights, is_plain(first));
      take_weights(weights);
      if (has_second) use_values(sums, weights, is_plain(first + 1));
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

  // Starts scores = Q K, part by part as they arrive.
  __device__ __forceinline__ void start_scores(Scores<I>& scores, const RingPlace& place, bool plain) {
    constexpr uint32_t kPanels = I::kHeadDim / 64, kInPart = kPanels / I::kParts, kPanel = I::kPanelBytes / 16;
    // From one lane, so that the compiler finds descriptors once per warp.
    const unsigned char* const stage = shared_.stage(__shfl_sync(kWholeWarp, place.stage, 0));
    uint64_t keys = ptx::matrix_descriptor(stage, 16, kEightRows);
    uint64_t rows = ptx::matrix_descriptor(shared_.q(0), 16, kEightRows);
#pragma unroll 1  // all descriptors at once would take too many registers
    for (int part = 0; part < I::kParts; ++part) {
      wait_for(place, part, plain);
      ptx::wgmma_fence();
      // Where there are no columns behind V's, Q is 0, and stands for them.
      const bool is_short = part + 1 == I::kParts && p_.head_dim < I::kHeadDim;
      const uint64_t last_keys = (is_short ? rows : keys) + (kInPart - 1) * kPanel;
#pragma unroll
      for (uint32_t panel = 0; panel < kInPart; ++panel) {
#pragma unroll
        for (uint32_t step = 0; step < 4; ++step) {
          const uint64_t columns = panel + 1 < kInPart ? keys + panel * kPanel : last_keys;
          ptx::wgmma_ss<typename I::M, I::kShape.keys>(scores[0], rows + panel * kPanel + step * 2, columns + step * 2,
                                                       part > 0 || panel + step > 0);
        }
      }
      keys += kInPart * kPanel;
      rows += kInPart * kPanel;
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ static void hide_all(Scores<I>& scores) {
#pragma unroll
    for (uint32_t n = 0; n < I::kWarpKeys / 8; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) scores[0][n][i] = -kInfinity;
    }
  }

  // The largest scores over the stages of both groups.
  __device__ __forceinline__ void share_tops(RowFactors<I>& tops) const {
    const uint32_t lane = ptx::thread_index() % 32;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (lane % 4 == 0) shared_.of_rows[group_][row() + half * 8 + lane / 4] = tops[0][half];
    }
    meet();
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      tops[0][half] = fmaxf(tops[0][half], shared_.of_rows[1 - group_][row() + half * 8 + lane / 4]);
    }
  }

  // The groups exchange weights through memory for one of them, in which each thread has a place, as the threads of
  // both groups have the same fragments. The first group puts its weights there; the second takes them and puts its own
  // there. Returns those of the first group.
  __device__ __forceinline__ void give_weights(const Scores<I>& scores, WeightFragments<I>& weights) const {
    WeightFragments<I> mine;
#pragma unroll
    for (uint32_t n = 0; n < I::kShape.keys / 16; ++n) pack_weights<typename I::M>(scores[0], n * 2, mine[n]);
    if (group_ == 1) {
      ptx::barrier_sync(kWeightsGiven, I::kConsumers);
      read_weights(weights);
    } else {
#pragma unroll
      for (uint32_t n = 0; n < I::kShape.keys / 16; ++n) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) weights[n][i] = mine[n][i];
      }
    }
    uint4* const to = shared_.weights() + ptx::thread_index() % 128;
#pragma unroll
    for (uint32_t n = 0; n < I::kShape.keys / 16; ++n) {
      to[n * 128] = make_uint4(mine[n][0], mine[n][1], mine[n][2], mine[n][3]);
    }
    ptx::barrier_arrive(kWeightsGiven + group_, I::kConsumers);
  }
  // Those of the second group.
  __device__ __forceinline__ void take_weights(WeightFragments<I>& weights) const {
    if (group_ == 0) ptx::barrier_sync(kWeightsGiven + 1, I::kConsumers);
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

  // out += weights * V of the group's columns, and gives the stage back.
  __device__ __forceinline__ void use_values(Accumulator<I>& sums, const WeightFragments<I>& weights, bool plain) {
#pragma unroll
    for (int part = 0; part < I::kParts; ++part) wait_for(place_, part, plain);
    const int stage = __shfl_sync(kWholeWarp, place_.stage, 0);
    place_.advance(call_.stages);
    start_values<I>(sums, weights, shared_.stage(stage) + column() / 64 * I::kPanelBytes);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(sums.out[0]);
    release(stage);
  }

  // Each group has the weights of its own stages. Afterwards a row's first lane has their sum, the other lanes 0.
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
