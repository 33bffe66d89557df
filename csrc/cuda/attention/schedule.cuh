// The kernel that makes a plan.
#pragma once

#include <iterator>

#include "cuda/attention/ranges.cuh"
#include "cuda/tile/reduce.cuh"

namespace pagedtree::cuda {

constexpr int kScheduleThreads = 512;  // more would leave too few registers

struct PlannedStart {
  WorkPosition at;
  int32_t row_tiles;  // of its sequence
};

struct PlanShared {
  WorkSum sums[kScheduleThreads];  // of the sequences up to those of a thread
  PlannedStart starts[kMaxPlanRanges + 1];
};

// What plan_kernel needs for each list.
struct PlanLists {
  WorkShape work[std::size(kWorkLists)];
  RangeLimits limits[std::size(kWorkLists)];
};

// The record of a range that begins at `start`, without what depends on the others: it has the row tile to its end.
__device__ __forceinline__ RangeRecord record_of(const WorkShape& shape, const SequenceWork& work,
                                                 const WorkPosition& start) {
  RangeRecord record{};
  record.begin = start;
  record.kv_end = work.kv_tiles;
  record.kv_head = static_cast<int32_t>(quotient(start.row_tile, work.m_tiles));
  record.first_row = static_cast<uint32_t>(start.row_tile - record.kv_head * work.m_tiles) * work.tile_rows;
  record.first_token = static_cast<int32_t>(work.tokens.begin);
  record.num_queries = static_cast<int32_t>(work.tokens.size());
  record.seq_len = work.seq_len;
  record.num_kv_heads = shape.num_kv_heads;
  return record;
}

// How many of the starts are before that of row tile `row_tile`, or of its second KV tile.
__device__ __forceinline__ int32_t starts_before(const PlannedStart* starts, int32_t count, const WorkPosition& at) {
  int32_t low = 0;
  for (int32_t high = count; low < high;) {
    const int32_t middle = (low + high) / 2;
    starts[middle].at.before(at) ? low = middle + 1 : high = middle;
  }
  return low;
}

// Completes the record of range i < `count`; starts[count] is the end. A range that is empty or begins behind a
// sequence's row tiles has no piece; the first one begins at the origin, where there may be none.
__device__ __forceinline__ void complete(RangeRecord& record, const PlannedStart* starts, int32_t count, int32_t i,
                                         uint32_t kind) {
  const auto [start, row_tiles] = starts[i];
  const WorkPosition stop = starts[i + 1].at;
  const bool begins = i > 0 || (start.sequence == 0 && start.row_tile == 0);
  if (begins && start.row_tile < row_tiles && start.before(stop)) record.kind = kind;
  if (start.same_row(stop)) record.kv_end = stop.kv_tile;
  record.has_more = start.next(row_tiles).before(stop);
  int32_t first_cut = 0, end = 0;  // of the starts inside the row tile
#pragma unroll 1
  for (int32_t k = 0; k < 2; ++k) {
    first_cut = end;
    end = starts_before(starts, count, {start.sequence, start.row_tile + k, 1 - k});
  }
  record.number = start.kv_tile > 0 ? i - first_cut + 1 : 0;
  record.count = end - first_cut + 1;
}

// make_ranges() with one CTA per list, which goes through the sequences until it knows how many ranges there are and
// how many CTAs share each, and then once more. Each thread sums the costs of a run of sequences, and at last finds the
// starts of some ranges.
__global__ void __launch_bounds__(kScheduleThreads, 1)
    plan_kernel(const __grid_constant__ PlanLists lists, int32_t* plan) {
  PlanShared& shared = ptx::shared<PlanShared>();
  WorkShape shape = lists.work[blockIdx.x];
  shape.few_rows_heads = 1;
  const RangeLimits& limits = lists.limits[blockIdx.x];
  int32_t* const ranges = ranges_of_list(plan, shape.list);
  auto* const records = reinterpret_cast<RangeRecord*>(ranges) + 1;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  const auto batch = static_cast<int32_t>(shape.batch), run = max_of(ceil_div(batch, threads), 1),
             runs = max_of(ceil_div(batch, run), 1), busy = threads > 32 ? 32 : 0;  // for which the others wait
#pragma unroll 1
  for (int32_t i = thread - busy; i < kListSize / 4 && thread >= busy; i += threads - busy)
    reinterpret_cast<uint4*>(ranges)[i] = make_uint4(0, 0, 0, 0);

  WorkSum alone{}, total{};
  Cuts cuts;
  const int32_t& num_ranges = cuts.num_ranges;
  int32_t sharers = 1, wanted = 0;
#pragma unroll 1
  for (int pass = 0; num_ranges >= 0; ++pass) {  // alone; shared; if that costs too much, alone again
    for (int32_t range = thread; range < (num_ranges > 0 ? num_ranges : thread + 1); range += threads) {
      int32_t b = thread * run, end = min_of(b + run, batch);
      int64_t target = INT64_MAX;
      WorkSum sum{};
      if (num_ranges > 0) {
        target = cuts.target(range);
        int32_t low = 0;  // finds the first run whose end is past the target
        for (int32_t high = runs - 1; low < high;) {
          const int32_t middle = (low + high) / 2;
          cuts.progress(shared.sums[middle]) > target ? high = middle : low = middle + 1;
        }
        b = low * run;
        end = batch;
        if (low > 0) sum = shared.sums[low - 1];
      }
#pragma unroll 1
      for (; b < end; ++b) {
        const SequenceWork work = sequence_work(shape, b, sharers);
        const RowCosts costs(shape, work, b);
        const WorkSum with = sum + costs.sum();
        if (target < cuts.progress(with)) {
          const int64_t offset = target - cuts.progress(sum);
          const WorkPosition start = cuts.start(shape, work, costs, b, offset, limits.min_piece);
          shared.starts[range] = {start, work.row_tiles};
          records[range] = record_of(shape, work, start);
          break;
        }
        sum = with;
      }
      if (num_ranges == 0) shared.sums[thread] = sum;
    }
    if (num_ranges > 0) break;
    block_scan(shared.sums, shared.sums[thread], runs, [](const WorkSum& a, const WorkSum& b) { return a + b; });
    total = shared.sums[runs - 1];
    __syncthreads();
    if (pass == 0) alone = total;
    wanted = pass == 0 ? sharers_of(alone, limits) : pass == 1 && can_share(alone, total, sharers) ? sharers : 1;
    if (wanted == sharers) cuts = Cuts(total, limits, sharers);
    sharers = wanted;
  }
  if (thread == 0) {
    ranges[0] = num_ranges;
    ranges[1] = sharers;
    shared.starts[num_ranges].at = {batch, 0, 0};
  }
  __syncthreads();
  if (total.cost == 0) return;
  for (int32_t range = thread; range < num_ranges; range += threads) {
    complete(records[range], shared.starts, num_ranges, range, RangeRecord::kind_of(shape, shape.m_tile, sharers));
  }
}

}  // namespace pagedtree::cuda
