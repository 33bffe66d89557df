// The kernels in front of attention: the plan, and the ranges of a call.
#pragma once

#include <iterator>

#include "cuda/tile/reduce.cuh"
#include "cuda/tree_attention/call.h"

namespace pagedtree::cuda {

constexpr int kScheduleThreads = 1024;
static_assert(kScheduleThreads >= kMaxPlanRanges);

struct PlanShared {
  int64_t costs[kScheduleThreads];
};

// What a plan is made of: for each list its work and the most ranges.
struct PlanLists {
  WorkShape work[std::size(kWorkLists)];
  int32_t max_ranges[std::size(kWorkLists)];
};

// make_ranges() by one CTA a list: each thread sums the costs of a run of sequences, then finds the starts of some
// ranges.
__global__ void __launch_bounds__(kScheduleThreads)
    plan_kernel(const __grid_constant__ PlanLists lists, int64_t min_range_cost, int32_t* plan) {
  PlanShared& shared = ptx::shared<PlanShared>();
  const WorkShape& shape = lists.work[blockIdx.x];
  int32_t* const ranges = ranges_of_list(plan, shape.list);
  const int32_t thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  const int64_t run = ceil_div<int64_t>(shape.batch, threads);
  int64_t cost = 0;
  for (int64_t b = thread * run; b < min_of((thread + 1) * run, shape.batch); ++b)
    cost += sequence_work(shape, b).cost();
  block_scan(shared.costs, cost, [](int64_t a, int64_t b) { return a + b; });
  const int64_t total = shared.costs[threads - 1];
  const int32_t num_ranges = num_ranges_of(total, lists.max_ranges[blockIdx.x], min_range_cost);
  for (int32_t i = thread; i < kListSize; i += threads) ranges[i] = i == 0 ? num_ranges : 0;
  __syncthreads();
  for (int32_t range = thread; range < num_ranges && total > 0; range += threads) {
    const int64_t target = range_target(total, num_ranges, range);
    int32_t low = 0, high = threads - 1;  // the first run whose end is past the target
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      shared.costs[middle] > target ? high = middle : low = middle + 1;
    }
    int64_t b = low * run, before = low == 0 ? 0 : shared.costs[low - 1];
    SequenceWork work = sequence_work(shape, b);
    while (before + work.cost() <= target) {
      before += work.cost();
      work = sequence_work(shape, ++b);
    }
    set_range_start(ranges, range, cut_position(work, static_cast<int32_t>(b), target - before));
  }
}

// The ranges as the CTAs of the attention kernel find them: the plan's, made monotonic, empty ones dropped, and for
// each row tile that a cut crosses who computes its pieces. One CTA a list, with a thread for each range that there may
// be.
struct RangesShared {
  WorkPosition positions[kScheduleThreads + 1];
  int32_t counts[kScheduleThreads];
};

__global__ void __launch_bounds__(kScheduleThreads)
    find_ranges_kernel(const __grid_constant__ CallShapes calls, const int32_t* plan) {
  RangesShared& shared = ptx::shared<RangesShared>();
  const WorkShape& shape = calls.lists[blockIdx.x].work;
  const Ranges& ranges = calls.lists[blockIdx.x].ranges;
  const int32_t* const planned = ranges_of_list(plan, shape.list);
  const int32_t i = static_cast<int32_t>(threadIdx.x), num_planned = planned_ranges(planned, ranges.capacity);
  const WorkPosition end = range_start(shape, planned, num_planned, num_planned);
  const auto later = [](WorkPosition left, WorkPosition right) {
    if (right.before(left)) right = left;
    return right;
  };
  const WorkPosition start = block_scan(shared.positions, range_start(shape, planned, num_planned, i), later);
  WorkPosition next = end;
  if (i + 1 < num_planned) next = shared.positions[i + 1];
  const bool used = i < num_planned && start.before(next);
  const int32_t index = block_scan(shared.counts, used ? 1 : 0, [](int32_t a, int32_t b) { return a + b; }) - 1;
  const int32_t count = shared.counts[blockDim.x - 1];
  __syncthreads();
  if (used) shared.positions[index] = start;
  if (i == 0) shared.positions[count] = end;
  __syncthreads();

  const auto cuts = [&](int32_t range) { return range > 0 && range < count && shared.positions[range].kv_tile > 0; };
  const auto same_row = [&](int32_t a, int32_t b) { return shared.positions[a].same_row(shared.positions[b]); };
  const bool first_cut = cuts(i) && !(cuts(i - 1) && same_row(i - 1, i));
  const int32_t owner =
      block_scan(shared.counts, first_cut ? i - 1 : -1, [](int32_t a, int32_t b) { return max_of(a, b); });
  if (i < count) {
    ranges.starts[i] = shared.positions[i];
    ranges.owners[i] = owner;
    ranges.arrivals[i] = 0;
    if (cuts(i) && !(cuts(i + 1) && same_row(i, i + 1))) ranges.lasts[owner] = i;
  }
  if (i == 0) {
    *ranges.count = count;
    ranges.starts[count] = end;
  }
}

}  // namespace pagedtree::cuda
