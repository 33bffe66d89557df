// Vocabularies that are split among ranks, see core/shards.h and core/shard_distributions.h.
#include <memory>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

void CpuBackend::step_shards(const ShardStepParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.shard.logits.num_rows, 1, [&](int64_t begin, int64_t end) {
    OptionsMemory memory(p.shard.options, p.shard.logits.vocab);
    for (int64_t row = begin; row < end; ++row) isa.step_shard(p, row, memory.scratch);
  });
}

void CpuBackend::weigh_shards(const ShardWeighParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, num_items(p), 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<RulesScratch>();
    OptionsMemory memory(p.shard.options, p.shard.logits.vocab);
    scratch->adjusted = &memory.scratch;
    for (int64_t item = begin; item < end; ++item) isa.weigh_shard(p, item, *scratch);
  });
}

}  // namespace pagedtree::cpu
