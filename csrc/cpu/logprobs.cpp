#include "core/logprobs.h"

#include <memory>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

void CpuBackend::token_logprobs(const TokenLogprobsParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.num_tokens, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<RulesScratch>();
    OptionsMemory memory(p.options, p.logits.vocab);
    scratch->adjusted = &memory.scratch;
    for (int64_t r = begin; r < end; ++r) isa.token_logprobs(p, r, *scratch);
  });
}

}  // namespace pagedtree::cpu
