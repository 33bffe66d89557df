// The ranges of a call.
#pragma once

#include "cuda/attention/call.h"

namespace pagedtree::cuda {

// The ranges of a plan; each CTA of a call reads its own.
struct CallRanges {
  const WorkShape& shape;
  const int32_t* planned;
  int32_t count;
  bool in_order;

  // All threads of a CTA meet here.
  __device__ __forceinline__ CallRanges(const WorkShape& of_call, const int32_t* plan, int32_t capacity)
      : shape(of_call), planned(ranges_of_list(plan, shape.list)), count(planned_ranges(planned, capacity)) {
    bool decreases = false;
    for (int32_t i = 2 + static_cast<int32_t>(threadIdx.x); i < count; i += static_cast<int32_t>(blockDim.x)) {
      decreases = decreases || planned_start(planned, i).before(planned_start(planned, i - 1));
    }
    in_order = !__syncthreads_or(decreases);
  }

  // Only a plan that attention_plan did not write is out of order; for such plans simple code matters more than speed.
  __device__ __forceinline__ WorkPosition start(int32_t range) const {
    if (in_order || range >= count) return range_start(shape, planned, count, range);
    WorkPosition latest{};
    for (int32_t i = 1; i <= range; ++i) {
      const WorkPosition start = range_start(shape, planned, count, i);
      if (latest.before(start)) latest = start;
    }
    return latest;
  }
};

}  // namespace pagedtree::cuda
