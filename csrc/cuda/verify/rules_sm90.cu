// Rules on lists of kept tokens, with rows on chip.
#include "cuda/logits/draws_sm90.cuh"
#include "cuda/verify/kept_rows.cuh"

namespace pagedtree::cuda {
namespace {

struct KeptOnChip {
  KeptShared kept;
  SliceShared slice;
  SliceTurns turns;
  alignas(kWordBytes) uint4 words[1];  // of the row
};

// The target's row, copied to the slice.
template <DType kDType>
struct RowOnChip {
  KeptOnChip& shared;
  LogitsSlice<kDType> slice;

  __device__ RowOnChip(KeptShared& kept, bool is_known)
      : shared(ptx::shared<KeptOnChip>()),
        slice(shared.slice, shared.words, kept.distributions.target.row.vocab, shared.turns) {
    const LogitRow& row = kept.distributions.target.row;
    slice.copy(row, 0);
    slice.receive(0, row, [&] { return row; });
    if (is_known) slice.apply(kept.distributions.target);
  }
  __device__ ~RowOnChip() {
    if (threadIdx.x == 0) shared.turns = slice.turns();
  }
};

template <DType kDType, Rule kRule>
__global__ void __launch_bounds__(kRowThreads, kRowCtas)
    kept_sm90_kernel(const __grid_constant__ RatioParams p, int buffers) {
  auto& shared = ptx::shared<KeptOnChip>();
  LogitsSlice<kDType>(shared.slice, shared.words, p.verify.logits.vocab).begin(buffers);
  if (threadIdx.x == 0) shared.turns = {};
  walk_kept<kRule, RowOnChip<kDType>>(p);
  ptx::meet_cluster();  // no stores may arrive after a CTA's exit
}

}  // namespace

template <Rule kRule>
bool rules_on_chip(const RatioParams& p, const ExecContext& ctx) {
  if (!may_be_on_chip(p.verify.logits, p.verify.options)) return false;
  if (p.draft_sampling.temperature != nullptr && !may_be_on_chip(p.draft, {})) return false;
  return with_logit_dtype(p.verify.logits.dtype, [&](auto dtype) {
    return launch_on_chip<dtype, KeptOnChip>(kept_sm90_kernel<dtype, kRule>, count_kept<kRule>(p), p.verify.logits, 1,
                                             p, ctx);
  });
}
#define PT_ON_CHIP(op, Params, Name, ...) template bool rules_on_chip<Rule::k##Name>(const Params&, const ExecContext&);
PT_EACH_WALK(PT_ON_CHIP, PT_ON_CHIP)

}  // namespace pagedtree::cuda
