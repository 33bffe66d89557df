#include <memory>

#include "core/verify/tree_walk.h"
#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

// The token of each visited row is drawn as `sample` would; the walk goes on while a child has drafted it.
void CpuBackend::verify_sampled(const VerifyParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.batch, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<FilterScratch>();
    OptionsMemory memory(p.options, p.logits.vocab);
    for (int64_t b = begin; b < end; ++b) {
      TreeWalk walk(p, b);
      walk.begin();
      const Sampling sampling = sampling_of(p.sampling, b);
      const uint64_t seed = p.seeds == nullptr ? 0 : static_cast<uint64_t>(p.seeds[b]);
      const uint64_t position = p.positions.data == nullptr ? 0 : static_cast<uint64_t>(integer_at(p.positions, b));
      for (bool more = walk.num_nodes > 0; more;) {
        LogitRow row = logit_row(p.logits, walk.row());
        if (p.options.used) row = isa.adjust_row(RowOptions(p.options, b, walk.row()), row, memory.scratch);
        const Draw draw = isa.draw_token(row, sampling, seed, static_cast<int64_t>(position + walk.depth), *scratch);
        if (draw.bad) walk.status |= kBadRow;
        walk.emit(draw.token);
        more = walk.descend(walk.child_with(draw.token));
      }
      walk.finish();
    }
  });
}

// Calls the rule for each tree of the batch.
static void for_each_tree(const RatioParams& p, const ExecContext& ctx,
                          void (*rule)(const RatioParams&, int64_t b, RulesScratch&)) {
  parallel_for(ctx, p.verify.batch, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<RulesScratch>();
    OptionsMemory memory(p.verify.options, p.verify.logits.vocab);
    scratch->adjusted = &memory.scratch;
    for (int64_t b = begin; b < end; ++b) rule(p, b, *scratch);
  });
}

void CpuBackend::verify_rejection(const RatioParams& p, const ExecContext& ctx) const {
  for_each_tree(p, ctx, isa_kernels().verify_rejection);
}

void CpuBackend::verify_block(const RatioParams& p, const ExecContext& ctx) const {
  for_each_tree(p, ctx, isa_kernels().verify_block);
}

void CpuBackend::verify_typical(const RatioParams& p, const ExecContext& ctx) const {
  for_each_tree(p, ctx, isa_kernels().verify_typical);
}

void CpuBackend::verify_traversal(const RatioParams& p, const ExecContext& ctx) const {
  for_each_tree(p, ctx, isa_kernels().verify_traversal);
}

}  // namespace pagedtree::cpu
