#include "core/sampling.h"

#include <memory>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/options_memory.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

void CpuBackend::sample(const SampleParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.logits.num_rows, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<FilterScratch>();
    OptionsMemory memory(p.options, p.logits.vocab);
    for (int64_t r = begin; r < end; ++r) {
      LogitRow row = logit_row(p.logits, r);
      if (p.options.used) row = isa.adjust_row(RowOptions(p.options, r, r), row, memory.scratch);
      const uint64_t seed = static_cast<uint64_t>(p.seeds[r]);
      p.tokens[r] = isa.draw_token(row, sampling_of(p.sampling, r), seed, integer_at(p.positions, r), *scratch).token;
    }
  });
}

}  // namespace pagedtree::cpu
