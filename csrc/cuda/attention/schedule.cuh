// The kernel that makes a plan.
#pragma once

#include <iterator>

#include "cuda/attention/ranges.cuh"
#include "cuda/tile/reduce.cuh"

namespace pagedtree::cuda {

constexpr int kScheduleThreads = 512;  // more would leave too few registers

struct PlanShared {
  WorkSum sums[kScheduleThreads];  // of the sequences up to those of a thread
  WorkPosition starts[kMaxPlanRanges];
};

// What plan_kernel needs for each list.
struct PlanLists {
  WorkShape work[std::size(kWorkLists)];
  RangeLimits limits[std::size(kWorkLists)];
};

// The record of a range that begins at `start`, without what depends on the others: it has the row tile to its end, and
// `has_more` row tiles of the sequence.
__device__ __forceinline__ RangeRecord record_of(const SequenceWork& work, const WorkPosition& start) {
  RangeRecord record{};
  record.begin = start;
  record.kv_end = work.kv_tiles;
  record.kv_head = start.row_tile / work.m_tiles;
  record.first_row = static_cast<uint32_t>(start.row_tile % work.m_tiles * work.tile_rows);
  record.first_token = static_cast<int32_t>(work.tokens.begin);
  record.num_queries = static_cast<int32_t>(work.tokens.size());
  record.seq_len = static_cast<int32_t>(work.seq_len);
  record.has_more = work.row_tiles;
  return record;
}

// Completes the record of range i < `count`. A range that is empty or begins behind a sequence's row tiles has no
// piece; the first one begins at the origin, where there may be none.
__device__ __forceinline__ void complete(RangeRecord& record, const WorkPosition* starts, int32_t count, int32_t i,
                                         const WorkPosition& end, uint32_t kind) {
  const WorkPosition start = record.begin, stop = i + 1 < count ? starts[i + 1] : end;
  const int32_t row_tiles = record.has_more;
  const bool is_origin = start.sequence == 0 && start.row_tile == 0;
  if (start.row_tile < row_tiles && start.before(stop) && (i > 0 || is_origin)) record.kind = kind;
  if (start.same_row(stop)) record.kv_end = stop.kv_tile;
  record.has_more = start.next(row_tiles).before(stop);
  const auto starts_before = [&](const WorkPosition& at) {
    int32_t low = 0, high = count;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      starts[middle].before(at) ? low = middle + 1 : high = middle;
    }
    return low;
  };
  const int32_t first_cut = starts_before({start.sequence, start.row_tile, 1});
  record.count = starts_before({start.sequence, start.row_tile + 1, 0}) - first_cut + 1;
  record.number = start.kv_tile > 0 ? i - first_cut + 1 : 0;
}

// make_ranges() with one CTA per list: each thread sums the costs of a run of sequences, then finds the starts of some
// ranges.
__global__ void __launch_bounds__(kScheduleThreads)
    plan_kernel(const __grid_constant__ PlanLists lists, int32_t* plan) {
  PlanShared& shared = ptx::shared<PlanShared>();
  const WorkShape& shape = lists.work[blockIdx.x];
  int32_t* const ranges = ranges_of_list(plan, shape.list);
  const int32_t thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  const int32_t run = ceil_div(static_cast<int32_t>(shape.batch), threads);
  const auto sum_up = [&](int32_t sharers) {
    WorkSum sum{};
    for (int64_t b = int64_t{thread} * run; b < min_of(int64_t{thread + 1} * run, shape.batch); ++b)
      sum = sum + RowCosts(shape, sequence_work(shape, b, sharers), b).sum();
    block_scan(shared.sums, sum, [](const WorkSum& a, const WorkSum& b) { return a + b; });
    const WorkSum total = shared.sums[threads - 1];
    __syncthreads();
    return total;
  };
  const RangeLimits& limits = lists.limits[blockIdx.x];
  WorkSum alone{}, total{};
  int32_t sharers = 1;
#pragma unroll 1
  for (int pass = 0, wanted = 0; wanted != sharers; ++pass) {  // alone; shared; if that costs too much, alone again
    if (pass > 0) sharers = wanted;
    total = sum_up(sharers);
    if (pass == 0) alone = total;
    wanted = pass == 0 ? sharers_of(alone, limits) : pass == 1 && can_share(alone, total, sharers) ? sharers : 1;
  }
  const Cuts cuts(total, limits, sharers);
  const int32_t num_ranges = cuts.num_ranges;
  for (int32_t i = thread; i < kListSize; i += threads) ranges[i] = 0;
  __syncthreads();
  auto* const records = reinterpret_cast<RangeRecord*>(ranges) + 1;
  if (thread == 0) {
    *reinterpret_cast<PlanHeader*>(ranges) = {num_ranges, sharers, shape.num_kv_heads, shape.group_size};
  }
  if (total.cost == 0) return;
  for (int32_t range = thread; range < num_ranges; range += threads) {
    const int64_t target = cuts.target(range);
    int32_t low = 0, high = threads - 1;  // finds the first run whose end is past the target
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      cuts.progress(shared.sums[middle]) > target ? high = middle : low = middle + 1;
    }
    int64_t b = int64_t{low} * run, before = low == 0 ? 0 : cuts.progress(shared.sums[low - 1]);
    while (true) {
      const SequenceWork work = sequence_work(shape, b, sharers);
      const RowCosts costs(shape, work, b);
      const int64_t after = before + cuts.progress(costs.sum());
      if (target < after) {
        const auto sequence = static_cast<int32_t>(b);
        const WorkPosition start = cuts.start(shape, work, costs, sequence, target - before, limits.min_piece);
        shared.starts[range] = start;
        records[range] = record_of(work, start);
        break;
      }
      before = after;
      ++b;
    }
  }
  __syncthreads();
  for (int32_t range = thread; range < num_ranges; range += threads) {
    const WorkPosition end = {static_cast<int32_t>(shape.batch), 0, 0};
    complete(records[range], shared.starts, num_ranges, range, end, RangeRecord::kind_of(shape.m_tile, sharers));
  }
}

}  // namespace pagedtree::cuda
