// Samples rows on chip, one cluster per row.
#include "cuda/logits/draws_sm90.cuh"
#include "cuda/logits/on_chip.h"

namespace pagedtree::cuda {
namespace {

struct SampleOnChip {
  DrawShared draw;
  alignas(kWordBytes) uint4 words[1];  // row; then ChipDraw's
};

template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, kChipCtas)
    sample_sm90_kernel(const __grid_constant__ SampleParams p, int buffers) {
  auto& shared = ptx::shared<SampleOnChip>();
  const int64_t r = ptx::cluster_index();
  LogitsSlice<kDType> slice(shared.draw.slice, shared.words, p.logits.vocab);
  slice.begin(buffers);
  slice.copy(logit_row(p.logits, r), 0);
  ChipDraw<kDType, true> draw(slice, shared.draw, slice.words(buffers), sampling_of(p.sampling, r),
                              static_cast<uint64_t>(p.seeds[r]), static_cast<int32_t>(p.logits.vocab));
  ptx::meet_cluster();
  bool bad = false;
  const int32_t token = draw.token(p.logits, r, 0, integer_at(p.positions, r), bad);
  if (leads_cluster()) p.tokens[r] = token;
  ptx::meet_cluster();  // no stores may arrive after a CTA's exit
}

}  // namespace

bool sample_on_chip(const SampleParams& p, const ExecContext& ctx) {
  if (!may_be_on_chip(p.logits, p.options)) return false;
  return with_logit_dtype(p.logits.dtype, [&](auto dtype) {
    return launch_on_chip<dtype, SampleOnChip>(sample_sm90_kernel<dtype>, p.logits.num_rows, p.logits, 1, p, ctx,
                                               ChipDraw<dtype, true>::bytes);
  });
}

}  // namespace pagedtree::cuda
