// Split-KV merge of row tiles that several CTAs share. A CTA whose partial results are stored polls briefly for the
// others, which need not be resident. Once all have arrived, polling CTAs claim parts of the columns and merge them
// over all partial results. The last one to arrive never polls, so every part is claimed. The order of sums is fixed.
#pragma once

#include "cuda/attention/output.cuh"

namespace pagedtree::cuda {

constexpr int kPolls = 64;  // polls of a ticket, about 0.7 us each

// Two tickets per row tile: CTAs that have arrived; parts claimed and, in the upper half, CTAs that left. Each CTA
// either leaves or finally claims a part that does not exist. So the last one is known, and resets both.
struct Tickets {
  unsigned *arrived, *claimed_parts;
  uint32_t count;  // of partial results, and of parts

  __device__ __forceinline__ Tickets(const Pieces& pieces, const PieceOrder& order, int32_t sharers)
      : arrived(pieces.ticket(order.first, true)),
        claimed_parts(pieces.ticket(order.first + sharers, false)),
        count(static_cast<uint32_t>(order.count)) {}

  // Returns true for the last arrival.
  __device__ __forceinline__ bool arrive() const { return ptx::fetch_add(arrived, 1) + 1 == count; }
  __device__ __forceinline__ bool wait() const {
#pragma unroll 1
    for (int poll = 0; poll < kPolls; ++poll) {
      if (ptx::load_acquire(arrived) == count) return true;
    }
    return false;
  }
  // Asynchronous: claimed() consumes the result.
  __device__ __forceinline__ uint32_t claim() const { return atomicAdd(claimed_parts, 1u); }
  __device__ __forceinline__ void go() const { claimed(atomicAdd(claimed_parts, kUpper)); }
  __device__ __forceinline__ uint16_t claimed(uint32_t before) const {
    if (before % kUpper + before / kUpper + 1 == 2 * count) *arrived = *claimed_parts = 0;
    return static_cast<uint16_t>(before);
  }

 private:
  static constexpr uint32_t kUpper = 1u << 16;
};

// Merges part `part` of a row tile: columns in units of four from the first row. All partial results are copied to
// `memory` (TileShape::join_bytes()) at once; `meanwhile` runs during the copies.
template <typename I, typename PieceOf, typename Meet, typename Meanwhile>
__device__ __forceinline__ void join_part(const PieceOf& piece_of, uint32_t count, uint32_t part,
                                          const ToOutput<typename I::T>& output, void* memory, uint32_t num_threads,
                                          const Meet& meet, const Meanwhile& meanwhile) {
  constexpr uint32_t kFours = I::kHeadDimV / 4;  // per row
  const uint32_t thread = ptx::thread_index(), lane = thread % 32, all = output.tile.rows * kFours,
                 of_part = ceil_div(all, count), begin = min_of(part * of_part, all),
                 fours = min_of(of_part, all - begin), first_pair = begin / kFours / 2,
                 pairs = fours == 0 ? 0 : (begin + fours - 1) / kFours / 2 - first_pair + 1;
  auto* const outs = static_cast<float4*>(memory);
  auto* const states = outs + count * fours;  // two rows each
#pragma unroll 1
  for (uint32_t i = thread / 32; i < count; i += num_threads / 32) {
    const Piece piece = piece_of(i);
#pragma unroll 1
    for (uint32_t k = lane; k < fours; k += 32) {
      ptx::cp_async_16(ptx::smem_addr(outs + i * fours + k), piece.out + (begin + k) * 4);
    }
#pragma unroll 1
    for (uint32_t k = lane; k < pairs; k += 32) {
      ptx::cp_async_16(ptx::smem_addr(states + i * pairs + k), piece.states + (first_pair + k) * 2);
    }
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  meanwhile();
  meet();
#pragma unroll 1
  for (uint32_t k = thread; k < fours; k += num_threads) {
    const uint32_t row = (begin + k) / kFours, column = (begin + k) % kFours * 4;
    const float2* const of_row = reinterpret_cast<const float2*>(states) + row - first_pair * 2;
    float maximum = -kInfinity, sum = 0.0f, values[4] = {};
#pragma unroll 4
    for (uint32_t i = 0; i < count; ++i) maximum = fmaxf(maximum, of_row[i * pairs * 2].x);
#pragma unroll 2
    for (uint32_t i = 0; i < count; ++i) {
      const float2 state = of_row[i * pairs * 2];
      const float weight = weight_of(state.x, maximum);
      const float4 out = outs[i * fours + k];
      sum = __fmaf_rn(state.y, weight, sum);
      values[0] = __fmaf_rn(out.x, weight, values[0]);
      values[1] = __fmaf_rn(out.y, weight, values[1]);
      values[2] = __fmaf_rn(out.z, weight, values[2]);
      values[3] = __fmaf_rn(out.w, weight, values[3]);
    }
    output.row(row, maximum, sum, column == 0).store(column, values);
  }
}

// Epilogue of a CTA's range, when all its partial results are stored; until then accumulators occupy the registers and
// stages the shared memory. meet() is the barrier of the `num_threads` threads.
template <typename I, typename Meet>
__device__ __forceinline__ void join_cuts(const AttentionParams& p, const CallShape& call, RangeIterator& walk,
                                          void* memory, uint32_t num_threads, const Meet& meet) {
  if (!walk.is_cut[0] && !walk.is_cut[1]) return;
  const Pieces pieces = pieces_of<I>(call);
  const auto [sharers, cta, range] = walk.share;
  const uint32_t thread = ptx::thread_index();
  meet();
  if (thread < 2 && walk.is_cut[thread]) {  // both before waiting, against a chain of waits
    const PieceOrder order = pieces.cuts(cta)[thread].order;
    walk.is_cut[thread] = order.count > 1;
    walk.is_last[thread] = order.count > 1 && Tickets(pieces, order, sharers).arrive();
  }
  meet();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (!walk.is_cut[i]) continue;
    const Cut cut = pieces.cuts(cta)[i];
    const Tickets tickets(pieces, cut.order, sharers);
    if (thread == 0) {
      const bool joins = walk.is_last[i] || tickets.wait();
      if (!joins) tickets.go();
      walk.part[i] = joins ? tickets.claimed(tickets.claim()) : static_cast<uint16_t>(tickets.count);
    }
    meet();
#pragma unroll 1
    for (uint32_t part = walk.part[i]; part < tickets.count; part = walk.part[i]) {
      uint32_t next = 0;
      const auto piece_of = [&](uint32_t number) {
        return pieces.of(cut.order.first + static_cast<int32_t>(number) * sharers, number == 0);
      };
      join_part<I>(piece_of, tickets.count, part, {p, cut, call.out_aligned}, memory, num_threads, meet, [&] {
        if (thread == 0) next = tickets.claim();  // after the first claims of polling CTAs
      });
      if (thread == 0) walk.part[i] = tickets.claimed(next);
      meet();
    }
  }
}

}  // namespace pagedtree::cuda
