// Compiled once per instruction set: its table.
#include "cpu/isa.h"
#include "cpu/isa/attention/kernels.h"

#define PT_STRING_(x) #x
#define PT_STRING(x) PT_STRING_(x)

// AMX is for attention: its table has the kernels over rows of another instruction set.
namespace pagedtree::cpu::PAGEDTREE_ROWS_ISA {

Draw draw_token(const LogitRow& row, const Sampling& sampling, uint64_t seed, int64_t position, FilterScratch& scratch);
LogitRow adjust_row(const RowOptions& options, const LogitRow& row, AdjustedRow& scratch);
void token_logprobs(const TokenLogprobsParams& p, int64_t r, RulesScratch& scratch);
void quantize_e4m3(const void* src, DType dtype, int64_t count, float scale, uint8_t* dst);
double top_tokens(const LogitRow& row, int32_t k, bool with_sum, int64_t* tokens, float* logits);
void draw_children(const LogitRow& row, const Sampling& sampling, const ChildrenDraw& draw, FilterScratch& scratch);
void verify_rejection(const RatioParams& p, int64_t b, RulesScratch& scratch);
void verify_block(const RatioParams& p, int64_t b, RulesScratch& scratch);
void verify_typical(const RatioParams& p, int64_t b, RulesScratch& scratch);
void verify_traversal(const RatioParams& p, int64_t b, RulesScratch& scratch);
void step_shard(const ShardStepParams& p, int64_t row, AdjustedRow& scratch);
void weigh_shard(const ShardWeighParams& p, int64_t item, RulesScratch& scratch);
void delta_rule(const DeltaRuleParams& p, int64_t item, DeltaScratch& scratch);
void conv1d(const ConvParams& p, int64_t b, int64_t first);

}  // namespace pagedtree::cpu::PAGEDTREE_ROWS_ISA

namespace pagedtree::cpu::PAGEDTREE_ISA {

const IsaKernels& kernels() {
  namespace rows = PAGEDTREE_ROWS_ISA;
  static constexpr IsaKernels table = {
      .name = PT_STRING(PAGEDTREE_ISA),
      .draw_token = rows::draw_token,
      .adjust_row = rows::adjust_row,
      .token_logprobs = rows::token_logprobs,
      .quantize_e4m3 = rows::quantize_e4m3,
      .top_tokens = rows::top_tokens,
      .draw_children = rows::draw_children,
      .verify_rejection = rows::verify_rejection,
      .verify_block = rows::verify_block,
      .verify_typical = rows::verify_typical,
      .verify_traversal = rows::verify_traversal,
      .step_shard = rows::step_shard,
      .weigh_shard = rows::weigh_shard,
      .delta_rule = rows::delta_rule,
      .conv1d = rows::conv1d,
      .attend = attend,
      .merge_pieces = merge_pieces,
      .merge_states = merge_states,
  };
  return table;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
