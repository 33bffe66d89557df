#include "core/step.h"

#include "cpu/backend.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

void CpuBackend::prepare_step(const PrepareStepParams& p, const ExecContext& ctx) const {
  for (int64_t b = 0; b < p.batch; ++b) p.seq_lens[b] = prepared_length(p, b);
  for (int64_t i = 0; i <= p.batch; ++i) {
    p.cu_seqlens_q[i] = static_cast<int32_t>(clamp_to<int64_t>(p.cu_nodes[i], 0, p.num_rows));
  }
  parallel_for(ctx, p.total_q, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) prepare_row(p, row);
  });
}

void CpuBackend::commit(const CommitParams& p, const ExecContext& ctx) const {
  parallel_for(ctx, p.batch, 32, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) commit_sequence(p, b);
  });
}

}  // namespace pagedtree::cpu
