// The rules over lists of kept tokens, whose rows are on chip.
#include "cuda/draws_sm90.cuh"
#include "cuda/verify/kept_rows.cuh"

namespace pagedtree::cuda {
namespace {

struct KeptOnChip {
  KeptShared kept;
  SliceShared slice;
  SliceTurns turns;
  alignas(kWordBytes) uint4 words[1];  // of the row
};

// The row that the target's distribution has, copied here.
template <DType kDType>
struct RowOnChip {
  using Slice = LogitsSlice<kDType>;
  KeptOnChip& shared;
  Slice slice;

  static size_t bytes(int /*words_of_row*/) { return 0; }
  __device__ RowOnChip(KeptShared& kept, bool /*is_known*/)
      : shared(ptx::shared<KeptOnChip>()),
        slice(shared.slice, shared.words, kept.distributions.target.row.vocab, shared.turns) {
    slice.copy(kept.distributions.target.row, 0);
    slice.wait(0);
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
  ptx::meet_cluster();  // no CTA is told anything when it has gone
}

template <Rule kRule>
bool launch_rule(const RatioParams& p, const ExecContext& ctx) {
  bool launched = false;
  with_logit_dtype(p.verify.logits.dtype, [&](auto dtype) {
    launched = launch_on_chip<RowOnChip<dtype>, KeptOnChip>(kept_sm90_kernel<dtype, kRule>, p.verify.batch,
                                                            p.verify.logits, 1, p, ctx);
  });
  return launched;
}

}  // namespace

bool rules_on_chip(Rule rule, const RatioParams& p, const ExecContext& ctx) {
  if (!may_be_on_chip(p.verify.logits, p.verify.options)) return false;
  if (p.draft_sampling.temperature != nullptr && !may_be_on_chip(p.draft, {})) return false;
  switch (rule) {
    case Rule::kRejection:
      return launch_rule<Rule::kRejection>(p, ctx);
    case Rule::kBlock:
      return launch_rule<Rule::kBlock>(p, ctx);
    case Rule::kTypical:
      return launch_rule<Rule::kTypical>(p, ctx);
    default:
      return launch_rule<Rule::kTraversal>(p, ctx);
  }
}

}  // namespace pagedtree::cuda
