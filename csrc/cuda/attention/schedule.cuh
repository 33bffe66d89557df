// Plan kernel: divides the work of a call into kv ranges of equal cost.
#pragma once

#include <iterator>

#include "cuda/attention/ranges.cuh"
#include "cuda/tile/reduce.cuh"

namespace pagedtree::cuda {

constexpr int kScheduleThreads = kMaxPlanRanges;  // one per range

struct PlanShared {
  union {
    WorkSum sums[kScheduleThreads];  // inclusive prefix sums per thread
    struct alignas(16) {
      WorkPosition at;
    } starts[kMaxPlanRanges];
  };
  uint64_t costs[kScheduleThreads + 1];  // exclusive prefix sums per thread
};
static_assert(sizeof(PlanShared) <= 48 << 10, "more has to be asked for");

struct PlanLists {
  struct {
    WorkShape work;
    RangeLimits limits;
  } lists[std::size(kWorkLists)];
  int32_t run, runs;  // sequences per thread; threads with any
  int32_t plan_size;
  SmallDivisor by_sharers[kMostSharers + 1];

  PlanLists(int64_t batch, int64_t size) : plan_size(static_cast<int32_t>(size)) {
    run = static_cast<int32_t>(max_of<int64_t>(ceil_div<int64_t>(batch, kScheduleThreads), 1));
    runs = static_cast<int32_t>(max_of<int64_t>(ceil_div<int64_t>(batch, run), 1));
    for (int32_t sharers = 1; sharers <= kMostSharers; ++sharers) by_sharers[sharers] = SmallDivisor(sharers);
  }
};

// make_ranges(), one CTA per list. Passes over the sequences determine the number of ranges and of CTAs that share
// each; a last pass finds the starts. Each thread sums a run of sequences, then finds the start of one range.
__global__ void __launch_bounds__(kScheduleThreads, 1)
    plan_kernel(const __grid_constant__ PlanLists lists, int32_t* plan) {
  PlanShared& shared = ptx::shared<PlanShared>();
  auto [shape, limits] = lists.lists[blockIdx.x];
  shape.few_rows_heads = 1;
  limits.min_piece = kMinPieceTiles;
  int32_t* const ranges = ranges_of_list(plan, shape.list);
  const auto thread = static_cast<int32_t>(threadIdx.x), batch = static_cast<int32_t>(shape.batch),
             tokens = static_cast<int32_t>(shape.num_tokens);
  if (thread == 0) shared.costs[0] = 0;
  if (blockIdx.x == 0) {
    for (int32_t i = kPlanSize + thread; i < lists.plan_size; i += static_cast<int32_t>(blockDim.x)) plan[i] = 0;
  }

  Cuts cuts;
  RangeRecord record;
  float alone = -1.0f;
  int32_t sharers = 1, run = thread, range = thread, row_tiles = 0;
  uint64_t target = UINT64_MAX;
#pragma unroll 1
  while (true) {  // passes: alone; shared; alone again if that is too costly; starts
    WorkSum sum{};
    if (cuts.num_ranges > 0) {
      run = 0;  // first run that ends past the target
      int32_t end = lists.runs - 1;
#pragma unroll 1
      do {
        const int32_t middle = (run + end) >> 1;
        shared.costs[middle + 1] > target ? end = middle : run = middle + 1;
      } while (run < end);
      sum.cost = shared.costs[run];
    }
    const SmallDivisor by_sharers = lists.by_sharers[sharers];
    const auto end = static_cast<int32_t>(min_of<uint32_t>((run + 1) * lists.run, batch));
    uint64_t next = 0;
#pragma unroll 1
    for (int32_t b = run * lists.run; b < end; ++b) {
      const int32_t first = clamp_to(shape.cu_seqlens_q[b], 0, tokens),
                    count = clamp_to(shape.cu_seqlens_q[b + 1], first, tokens) - first;
      const SequenceWork work = sequence_work(shape, b, {first, first + int64_t{count}}, sharers, by_sharers);
      const RowCosts costs(shape, work, cuts.each);
      const WorkSum with = sum + costs.sum;
      if (target < with.cost) {
        const Cuts::Start start = cuts.start(shape, work, costs, b, sum.cost, target, range, limits.min_piece);
        const uint32_t first_row = static_cast<uint32_t>(start.m_tile) * work.tile_rows;
        record = {start.at, work.kv_tiles, 0, start.head,   first_row,   first, shape.num_kv_heads,
                  count,    work.seq_len,  0, start.number, start.count, {0, 0}};
        row_tiles = work.row_tiles;
        next = start.next;
        break;
      }
      sum = with;
    }
    if (cuts.num_ranges > 0) {
      if (next == 0) break;
      target = next;
      range = -1;
      row_tiles = 0;
      continue;
    }
    int32_t i = thread;
#pragma unroll 1
    do {
      reinterpret_cast<uint4*>(ranges)[i] = make_uint4(0, 0, 0, 0);
    } while ((i += static_cast<int32_t>(blockDim.x)) < kListSize / 4);
    sum = block_scan(shared.sums, sum, lists.runs, [](const WorkSum& a, const WorkSum& b) { return a + b; });
    const WorkSum total = shared.sums[lists.runs - 1];
    int32_t wanted = sharers;
    if (alone < 0.0f) {
      alone = static_cast<float>(total.cost);
      const auto most = static_cast<int32_t>(kMostSharers - threadIdx.x % kMostSharers);
      const uint32_t least = __reduce_min_sync(kWholeWarp, misfit(total, limits, most, lists.by_sharers[most]));
      wanted = kMostSharers - static_cast<int32_t>(least % kMostSharers);
    } else if (!can_share(alone, total, sharers)) {
      wanted = 1;
    }
    if (wanted == sharers) {
      limits.fit(total);
      cuts = Cuts(total, limits, sharers, by_sharers);
      target = cuts.target(thread);
    }
    sharers = wanted;
    shared.costs[thread + 1] = cuts.each > 0 ? uint64_t{cuts.each} * static_cast<uint32_t>(sum.row_tiles) : sum.cost;
    __syncthreads();
  }
  if (row_tiles == 0 || thread >= cuts.num_ranges) record.begin = {thread > 0 ? batch : 0, 0, 0};
  shared.starts[thread] = {record.begin};
  __syncthreads();
  if (thread >= cuts.num_ranges) return;
  if (thread == 0) {
    ranges[0] = cuts.num_ranges;
    ranges[1] = sharers;
  }
  auto& planned = reinterpret_cast<RangeRecord*>(ranges)[thread + 1];
  const WorkPosition begin = record.begin;
  WorkPosition stop{batch, 0, 0};
  if (thread + 1 < cuts.num_ranges) stop = shared.starts[thread + 1].at;
  planned.begin = begin;
  if (row_tiles == 0) return;
  const bool is_cut = begin.same_row(stop);
  if (is_cut) record.kv_end = stop.kv_tile;
  record.has_more = !(is_cut | (begin.next(row_tiles) == stop));
  // Starts ascend. The first range begins at the origin, which may have no work tile.
  const bool is_empty = is_cut & (begin.kv_tile == stop.kv_tile), is_elsewhere = (thread == 0) & (begin.sequence > 0);
  record.kind = is_empty | is_elsewhere ? 0 : RangeRecord::kind_of(shape, shape.m_tile, sharers);
  planned = record;
}

}  // namespace pagedtree::cuda
