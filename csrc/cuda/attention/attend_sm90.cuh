// Hopper consumers: a warpgroup's 64 rows. S = Q K^T with both operands in shared memory; O += P V with P in registers.
#pragma once

#include "cuda/attention/attend.cuh"
#include "cuda/attention/stage_sm90.cuh"

namespace pagedtree::cuda {

// Prepares `count` of this warp's Q rows in shared memory for wgmma, from `row`: negated for a negative scale, as score
// factors are positive, and each scaled into the operand type's range. Writes the factors that undo it.
template <typename I>
__device__ __forceinline__ void adjust_q_rows(uint32_t row, uint32_t count, bool negate, float factor, unsigned char* q,
                                              Sm90Shared<I>& shared) {
  constexpr uint32_t kChunks = I::kHeadDim / 8, kLanes = min_of<uint32_t>(kChunks, 32),
                     kPerLane = ceil_div(kChunks, kLanes), kRows = 32 / kLanes;
  const uint32_t lane = ptx::thread_index() % 32, flip = negate ? 0x80008000u : 0u;
#pragma unroll 1
  for (uint32_t own = row + lane / kLanes; own < row + count; own += kRows) {
    uint4 values[kPerLane] = {};
    const auto at = [&](uint32_t i) -> uint4& {
      return *reinterpret_cast<uint4*>(q + I::QRows::offset(own % I::kGroupRows, lane % kLanes + i * kLanes));
    };
    const auto has = [&](uint32_t i) { return lane % kLanes + i * kLanes < kChunks; };
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {
      if (has(i)) values[i] = at(i);
    }
    if constexpr (I::kScalesRows) {
      uint32_t largest = 0;
#pragma unroll
      for (const uint4& v : values) {
        largest =
            larger_magnitudes(largest, larger_magnitudes(larger_magnitudes(v.x, v.y), larger_magnitudes(v.z, v.w)));
      }
      const RowScale scale(largest_magnitude<kLanes>(largest));
#pragma unroll
      for (uint4& v : values) v = scale.pairs(v);
      for (auto& of_group : shared.of_rows) {
        if (lane % kLanes == 0) of_group[own] = fmaxf(factor * scale.inverse(), 0x1p-126f);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) {
      const uint4& v = values[i];
      if (has(i)) at(i) = make_uint4(v.x ^ flip, v.y ^ flip, v.z ^ flip, v.w ^ flip);
    }
  }
}

constexpr uint32_t kEightRows = 8 * 128, kQPanelBytes = 8 * kEightRows;  // per panel of 64 columns

// Issues S = Q K^T.
template <typename I>
__device__ __forceinline__ void start_scores(Scores<I>& scores, const unsigned char* q, const unsigned char* k) {
  // A descriptor counts units of 16 bytes in its low bits, so that adding a constant advances the columns.
  const uint64_t rows = ptx::matrix_descriptor(q, 16, kEightRows), keys = ptx::matrix_descriptor(k, 16, I::kEightKeys);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t step = 0; step < I::kHeadDim / 16; ++step) {
    const uint32_t panel = step / 4, in_panel = step % 4 * 32;
    ptx::wgmma_ss<typename I::M, I::kShape.keys>(scores[0], rows + (panel * kQPanelBytes + in_panel) / 16,
                                                 keys + (panel * I::kPanelStep + in_panel) / 16, step > 0);
  }
  ptx::wgmma_commit();
}

template <typename I>
using WeightFragments = uint32_t[I::kShape.keys / 16][4];

template <typename I>
__device__ __forceinline__ void pack_weights(const Scores<I>& scores, WeightFragments<I>& weights) {
#pragma unroll
  for (uint32_t n = 0; n < I::kShape.keys / 16; ++n) pack_weights<typename I::M>(scores[0], n * 2, weights[n]);
}

// Issues O += P V.
template <typename I>
__device__ __forceinline__ void start_values(Accumulator<I>& sums, const WeightFragments<I>& weights,
                                             const unsigned char* v) {
  const uint64_t first_values = ptx::matrix_descriptor(v, I::kPanelStep, I::kEightKeys);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t n = 0; n < I::kShape.keys / 16; ++n) {
    const uint64_t values = first_values + n * 2 * I::kEightKeys / 16;
    ptx::wgmma_rs<typename I::M, I::kWarpColumns, true>(sums.out[0], weights[n], values, true);
  }
  ptx::wgmma_commit();
}

// Returns the warpgroup, broadcast so that the compiler treats it as warp-uniform.
__device__ __forceinline__ uint32_t group_of_warp() { return __shfl_sync(kWholeWarp, ptx::thread_index() / 128, 0); }

// Ping-pong: two warpgroups alternate at issuing products, so that one's softmax overlaps the other's tensor cores.
template <typename I>
struct Turns {
  uint32_t group = I::kTwoGroups ? group_of_warp() : 0;

  __device__ __forceinline__ void wait(bool both) const {
    if (I::kMTile > I::kGroupRows && both) ptx::barrier_sync(kTurns + group, I::kConsumers);
  }
  __device__ __forceinline__ void pass(bool both) const {
    if (I::kMTile > I::kGroupRows && both) ptx::barrier_arrive(kTurns + (1 - group), I::kConsumers);
  }
  // Group 0 has the first turn, and finally acquires the one that is left.
  __device__ __forceinline__ void begin() const {
    if (group == 1) pass(true);
  }
  __device__ __forceinline__ void end() const {
    if (group == 0) wait(true);
  }
};

template <typename I>
class ConsumerBase {
 public:
  __device__ __forceinline__ ConsumerBase(const AttentionParams& params, const CallShape& call, const CacheMaps& maps,
                                          Sm90Shared<I>& of_cta)
      : p_(params), call_(call), maps_(maps), shared_(of_cta) {}

  // Acquires the next work tile, or null at the end. It stays valid until the tile after the next is published.
  __device__ __forceinline__ const WorkTile* acquire() {
    trace<I>(shared_, kTileWaits);
    ptx::mbar_wait(&shared_.is_published[acquired_ % I::kQs], acquired_ / I::kQs % 2);
    trace<I>(shared_, kTileAcquired);
    const WorkTile& given = shared_.given[acquired_ % (2 * I::kQs)];
    ++acquired_;
    return given.tile.rows > 0 ? &given : nullptr;
  }

 protected:
  __device__ __forceinline__ uint32_t place() const { return (acquired_ - 1) % I::kQs; }
  // Releases Q and the per-row data.
  __device__ __forceinline__ void release_q() const {
    __syncwarp();
    if (ptx::thread_index() % 32 == 0) ptx::mbar_arrive(&shared_.is_used[place()]);
  }
  // Computes the rows' score factors, and prepares Q if needed. Groups that share rows prepare half each.
  template <typename Meet>
  __device__ __forceinline__ void adjust_q(const RowTile& tile, uint32_t row, uint32_t sharer, unsigned char* q,
                                           const Meet& meet, RowFactors<I>& factors) const {
    constexpr uint32_t kRows = 16 / I::kShape.column_warps;
    const float scale = score_scale(p_, tile.kv_head), factor = score_factor(p_, scale * kDecodedScale<typename I::Kv>);
    factors[0][0] = factors[0][1] = factor;
    if (I::kScalesRows || scale < 0.0f) {
      adjust_q_rows<I>(row + sharer * kRows, kRows, scale < 0.0f, factor, q, shared_);
      ptx::fence_proxy_async();
      meet();
      if constexpr (I::kScalesRows) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          factors[0][half] = shared_.of_rows[sharer][row + half * 8 + ptx::thread_index() % 32 / 4];
        }
        __syncwarp();  // after all reads
      }
    } else {
      ptx::fence_proxy_async();  // makes cp.async's writes visible to wgmma
    }
  }
  // Waits for a part of a stage; `plain`: unmasked.
  __device__ __forceinline__ void wait_for(const RingPlace& place, int part, bool plain) const {
    ptx::mbar_wait(&shared_.full[place.stage][part], place.parity);
    // cp.async: the producer cannot fence after its completion, so that readers must. TMA needs no fence.
    if (!I::kDecodes && !(plain && maps_.box > 0)) ptx::fence_proxy_async();
  }
  __device__ __forceinline__ void release(int stage, int part = 0) {
    __syncwarp();
    if (ptx::thread_index() % 32 == 0) ptx::mbar_arrive(&shared_.empty[stage][part]);
  }

  const AttentionParams& p_;
  const CallShape& call_;
  const CacheMaps& maps_;
  Sm90Shared<I>& shared_;
  RingPlace place_;
  uint32_t acquired_ = 0;  // number of row tiles
};

// Consumer of a ring of alternating K and V stages.
template <typename I>
class Consumer : public ConsumerBase<I> {
  using Base = ConsumerBase<I>;
  using Base::adjust_q, Base::release_q, Base::place, Base::wait_for, Base::release;
  using Base::p_, Base::call_, Base::maps_, Base::shared_, Base::place_;

 public:
  __device__ __forceinline__ Consumer(const AttentionParams& params, const CallShape& call, const CacheMaps& maps,
                                      Sm90Shared<I>& of_cta)
      : Base(params, call, maps, of_cta) {
    turns_.begin();
  }
  __device__ __forceinline__ void finish() { turns_.end(); }

  __device__ __forceinline__ uint32_t row() const { return ptx::thread_index() / 32 * 16; }
  __device__ __forceinline__ uint32_t column() const { return 0; }

  // Attends to the work tile's kv range. `sums` are undefined if the warp has no rows.
  __device__ __forceinline__ void attend(const WorkTile& given, Accumulator<I>& sums) {
    const RowTile& tile = given.tile;
    const KeyBounds& bounds = given.bounds;
    const StageRange stages = given.stages<I>();
    const auto is_plain = [&](int32_t stage) { return bounds.is_unmasked(stage * kKvTile, I::kShape.keys); };
    if (stages.first >= stages.end) {
      release_q();
      return sums.clear();
    }
    if (turns_.group * I::kGroupRows >= tile.rows) {
      release_q();
      return skip(stages);
    }
    const bool both = tile.rows > I::kGroupRows;
    const TreeWindow window = shared_.row_windows[place()][row() + own_row(ptx::thread_index() % 32)];
    // Recomputed, as the compiler would keep all descriptors in registers.
    const auto q = [&] {
      const uint32_t number = I::kQs > 1 ? __shfl_sync(kWholeWarp, place(), 0) : 0;
      return shared_.q(I::kTwoGroups && I::kHeadDim < 256 ? turns_.group : group_of_warp(), number);
    };
    RowFactors<I> row_factors;
    adjust_q(tile, row(), 0, q(), [&] { ptx::barrier_sync(kGroupsMeet + turns_.group, 128); }, row_factors);
    sums.clear();

    Scores<I> scores;
    const auto softmax_stage = [&](int32_t stage, bool plain, RowFactors<I>& rescales) {
      RowFactors<I> factors = {{row_factors[0][0], row_factors[0][1]}};
      if (p_.softcap != 0.0f) cap_scores<I>(p_.softcap * kLog2E, scores, factors);
      if (!plain) mask(tile, window, stage, stages.end, scores);
      return softmax<I>(scores, factors, sums, rescales);
    };
    WeightFragments<I> weights;

    ptx::wgmma_results(sums.out[0]);
    bool plain = is_plain(stages.first);
    int keys = next_stage(plain), values = 0;
    turns_.wait(both);
    start_scores<I>(scores, q(), shared_.stage(keys));
    ptx::wgmma_commit();  // an empty group in place of P V
    turns_.pass(both);
    // Pipelined: S of the next stage and its softmax overlap P V of this one.
    for (int32_t stage = stages.first;;) {
      ptx::wgmma_wait<I::kOverlapsSoftmax ? 1 : 0>();
      if constexpr (!I::kOverlapsSoftmax) ptx::wgmma_results(sums.out[0]);
      ptx::wgmma_results(scores[0]);
      trace<I>(shared_, kScoresThere);
      release(keys);
      if (stage + I::kTiles >= stages.end) release_q();
      RowFactors<I> rescales;
      const bool changed = softmax_stage(stage, plain, rescales);
      trace<I>(shared_, kSoftmaxDone);
      const auto end_values = [&] {
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(sums.out[0]);
      };
      // A wait per branch keeps ptxas from moving it before the softmax.
      if (PAGEDTREE_WEIGHTS_FIRST && changed) {
        end_values();
        rescale<I>(sums, rescales);
      } else {
        end_values();
      }
      if (stage != stages.first) release(values);
      if (!PAGEDTREE_WEIGHTS_FIRST && changed) rescale<I>(sums, rescales);
      trace<I>(shared_, kValuesDone);
      pack_weights<I>(scores, weights);
      stage += I::kTiles;
      if (stage >= stages.end) break;
      const bool next_plain = is_plain(stage);
      keys = next_stage(next_plain);
      trace<I>(shared_, kKeysThere);
      turns_.wait(both);
      trace<I>(shared_, kTurnGot);
      start_scores<I>(scores, q(), shared_.stage(keys));
      values = next_stage(plain);
      start_values<I>(sums, weights, shared_.stage(values));
      turns_.pass(both);
      plain = next_plain;
    }
    const int last_values = next_stage(plain);
    start_values<I>(sums, weights, shared_.stage(last_values));
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(sums.out[0]);
    release(last_values);
  }

 private:
  __device__ __forceinline__ int next_stage(bool plain) {
    wait_for(place_, 0, plain);
    // Broadcast, for descriptors in uniform registers.
    const int stage = __shfl_sync(kWholeWarp, place_.stage, 0);
    place_.advance(call_.stages);
    return stage;
  }
  __device__ __forceinline__ void mask(const RowTile& tile, const TreeWindow& window, int32_t stage, int32_t end,
                                       Scores<I>& scores) const {
    const uint32_t reader = ptx::thread_index() % 32;  // recomputed to save a register
    VisibleKeys<I::kWords> keys =
        visible_keys<I::kWords>(tile.visibility(p_, row() + own_row(reader), window), reader, stage * kKvTile);
    if (stage + I::kTiles > end) keys.hide_from(kKvTile);
    mask_scores(scores[0], keys, reader);
  }
  // Releases all stages: the other warpgroup has all rows.
  __device__ __forceinline__ void skip(const StageRange& stages) {
#pragma unroll 1
    for (int32_t left = 2 * ceil_div(stages.end - stages.first, I::kTiles); left > 0; --left) {
      ptx::mbar_wait(&shared_.full[place_.stage][0], place_.parity);
      release(place_.stage);
      place_.advance(call_.stages);
    }
  }

  Turns<I> turns_;
};

template <typename Row>
__device__ __forceinline__ Row row_of_lane(Row row, uint32_t lane) {
  const auto to = __shfl_sync(kWholeWarp, reinterpret_cast<uintptr_t>(row.to), static_cast<int>(lane));
  row.to = reinterpret_cast<decltype(row.to)>(to);
  if constexpr (requires { row.factor; }) row.factor = __shfl_sync(kWholeWarp, row.factor, static_cast<int>(lane));
  return row;
}

// True if results may be poisoned (see join()). All rows share the stages, hence one row per lane suffices.
template <typename I>
__device__ __forceinline__ bool is_poisoned(const Accumulator<I>& sums, const float (&totals)[2]) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (uint32_t n = 0; n < I::kWarpColumns / 8; ++n) {
    even = __fmaf_rn(sums.out[0][n][0], 0.0f, even);
    odd = __fmaf_rn(sums.out[0][n][1], 0.0f, odd);
  }
  return even + odd != 0.0f && (totals[0] == totals[0] || totals[1] == totals[1]);
}

// Epilogue: stores the warp's rows in `rows`. For 16-bit outputs lanes exchange pairs: each stores four neighbours.
template <typename I, typename Target>
__device__ __forceinline__ void store_rows(const Accumulator<I>& sums, const float (&totals)[2], uint32_t first_row,
                                           uint32_t first_column, const RowSpan& rows, const Target& target) {
  const uint32_t lane = ptx::thread_index() % 32, own = first_row + own_row(lane);
  const bool is_odd = lane % 2 != 0, is_second = lane / 2 % 2 != 0;
  const typename Target::Row mine =
      target.row(min_of(own, rows.end - 1), is_second ? sums.maximum[0][1] : sums.maximum[0][0],
                 is_second ? totals[1] : totals[0], !is_odd && first_column == 0 && rows.has(own));
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const typename Target::Row to = row_of_lane(mine, (lane & ~3u) | half * 2);
    const bool has_row = rows.has(first_row + half * 8 + lane / 4);
#pragma unroll
    for (uint32_t n = 0; n < I::kWarpColumns / 8; n += 2) {
      const float even[2] = {sums.out[0][n][half * 2], sums.out[0][n][half * 2 + 1]};
      const float odd[2] = {sums.out[0][n + 1][half * 2], sums.out[0][n + 1][half * 2 + 1]};
      if constexpr (requires { to.factor; }) {
        const uint32_t left = to.pack(even[0], even[1]), right = to.pack(odd[0], odd[1]);
        const uint32_t other = __shfl_xor_sync(kWholeWarp, is_odd ? left : right, 1);
        uint32_t pairs[2] = {is_odd ? other : left, is_odd ? right : other};
        if (has_row) to.put(first_column + (n + lane % 2) * 8 + lane % 4 / 2 * 4, pairs);
      } else if (has_row) {
        to.store(first_column + n * 8 + lane % 4 * 2, even);
        to.store(first_column + n * 8 + lane % 4 * 2 + 8, odd);
      }
    }
  }
}

}  // namespace pagedtree::cuda
