#include "core/logprobs.h"

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"

namespace pagedtree::cpu {

void CpuBackend::token_logprobs(const TokenLogprobsParams& p, const ExecContext& ctx) const {
  for_each_row(ctx, p.num_tokens, p.options, p.logits.vocab, p, isa_kernels().token_logprobs);
}

}  // namespace pagedtree::cpu
