// See core/verify/shards.h and shard_distributions.h.
#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"

namespace pagedtree::cpu {

void CpuBackend::step_shards(const ShardStepParams& p, const ExecContext& ctx) const {
  const LogitsParams& logits = p.shard.logits;
  for_each_row(ctx, logits.num_rows, p.shard.options, logits.vocab, p, isa_kernels().step_shard);
}

void CpuBackend::weigh_shards(const ShardResidualParams& p, const ExecContext& ctx) const {
  for_each_row(ctx, num_items(p), p.shard.options, p.shard.logits.vocab, p, isa_kernels().reduce_shard);
}

}  // namespace pagedtree::cpu
