#include "core/sampling.h"

#include <memory>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

void CpuBackend::sample(const SampleParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.logits.num_rows, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<FilterScratch>();
    for (int64_t r = begin; r < end; ++r) {
      const LogitRow row = logit_row(p.logits, r);
      const uint64_t seed = static_cast<uint64_t>(p.seeds[r]);
      p.tokens[r] = isa.draw_token(row, sampling_of(p.sampling, r), seed, p.positions[r], *scratch).token;
    }
  });
}

}  // namespace pagedtree::cpu
