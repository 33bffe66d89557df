// The kernel that makes a plan.
#pragma once

#include <iterator>

#include "cuda/attention/call.h"
#include "cuda/tile/reduce.cuh"

namespace pagedtree::cuda {

constexpr int kScheduleThreads = 512;  // more would leave too few registers

struct PlanShared {
  WorkSum sums[kScheduleThreads];  // of the sequences up to those of a thread
};

// What plan_kernel needs for each list.
struct PlanLists {
  WorkShape work[std::size(kWorkLists)];
  RangeLimits limits[std::size(kWorkLists)];
};

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
  for (int32_t i = thread; i < kListSize; i += threads) ranges[i] = i == 0 ? cuts.num_ranges : i == 1 ? sharers : 0;
  __syncthreads();
  for (int32_t range = thread; range < cuts.num_ranges && total.cost > 0; range += threads) {
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
        set_range_start(ranges, range, cuts.start(shape, work, costs, sequence, target - before, limits.min_piece));
        break;
      }
      before = after;
      ++b;
    }
  }
}

}  // namespace pagedtree::cuda
