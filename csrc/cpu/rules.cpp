// Runs the rules of core/ops.h item by item.
#include "core/kv_cache.h"
#include "core/step.h"
#include "core/tree.h"
#include "core/verify/shard_distributions.h"
#include "cpu/backend.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

#define PT_HOST(op, Params, rule, grain)                                      \
  void CpuBackend::op(const Params& p, const ExecContext& ctx) const {        \
    parallel_for(ctx, num_items(p), grain, [&p](int64_t begin, int64_t end) { \
      for (int64_t i = begin; i < end; ++i) rule(p, i);                       \
    });                                                                       \
  }
PT_EACH_RULE(PT_HOST)

}  // namespace pagedtree::cpu
