#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"

namespace pagedtree::cpu {
namespace {

// Calls the rule for each tree of the batch.
template <typename Params>
void for_each_tree(const VerifyParams& verify, const ExecContext& ctx, const Params& p,
                   void (*rule)(const Params&, int64_t b, RowScratch&)) {
  for_each_row(ctx, verify.batch, verify.options, verify.logits.vocab, p, rule);
}

}  // namespace

void CpuBackend::verify_sampled(const VerifyParams& p, const ExecContext& ctx) const {
  for_each_tree(p, ctx, p, isa_kernels().verify_sampled);
}

void CpuBackend::verify_rejection(const RatioParams& p, const ExecContext& ctx) const {
  for_each_tree(p.verify, ctx, p, isa_kernels().verify_rejection);
}

void CpuBackend::verify_block(const RatioParams& p, const ExecContext& ctx) const {
  for_each_tree(p.verify, ctx, p, isa_kernels().verify_block);
}

void CpuBackend::verify_typical(const RatioParams& p, const ExecContext& ctx) const {
  for_each_tree(p.verify, ctx, p, isa_kernels().verify_typical);
}

void CpuBackend::verify_traversal(const RatioParams& p, const ExecContext& ctx) const {
  for_each_tree(p.verify, ctx, p, isa_kernels().verify_traversal);
}

}  // namespace pagedtree::cpu
