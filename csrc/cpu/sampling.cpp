#include "core/sampling.h"

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"

namespace pagedtree::cpu {

void CpuBackend::sample(const SampleParams& p, const ExecContext& ctx) const {
  for_each_row(ctx, p.logits.num_rows, p.options, p.logits.vocab, p, isa_kernels().sample);
}

}  // namespace pagedtree::cpu
