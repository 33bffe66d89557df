#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

void CpuBackend::verify_sampled(const VerifyParams& p, const ExecContext& ctx) const {
  for_each_row(ctx, p.batch, p.options, p.logits.vocab, p, isa_kernels().verify_sampled);
}

void CpuBackend::verify_tokens(const VerifyTokensParams& p, const ExecContext& ctx) const {
  const VerifyParams& v = p.verify;
  parallel_for(ctx, v.batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      TreeWalk walk(v, b);
      const int64_t first = walk.rows.begin;
      walk_tokens(
          walk, [&](int32_t node) { return integer_at(p.target_tokens, first + node); },
          [&](int32_t node) { return draft_id_at(v.draft_tokens, v.draft_to_target, v.draft_vocab, first + node); });
    }
  });
}

#define PT_HOST(op, Params, ...)                                                \
  void CpuBackend::op(const Params& p, const ExecContext& ctx) const {          \
    const VerifyParams& v = p.verify;                                           \
    for_each_row(ctx, v.batch, v.options, v.logits.vocab, p, isa_kernels().op); \
  }
PT_EACH_WALK(PT_HOST, PT_HOST)

}  // namespace pagedtree::cpu
