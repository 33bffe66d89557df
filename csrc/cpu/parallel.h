#pragma once

#include "core/ops.h"

namespace pagedtree::cpu {

// Calls body(begin, end) for ranges that cover [0, count), on the caller's threads. `body` must not throw.
template <typename F>
static inline void parallel_for(const ExecContext& ctx, int64_t count, int64_t grain_size, const F& body) {
  if (count <= 0) return;
  if (ctx.parallel_for == nullptr || ctx.num_threads <= 1 || count <= grain_size) {
    body(int64_t{0}, count);
    return;
  }
  ctx.parallel_for(
      0, count, grain_size,
      [](int64_t begin, int64_t end, void* state) { (*static_cast<const F*>(state))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace pagedtree::cpu
