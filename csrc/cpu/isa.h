// Tables of vectorised kernels, one per instruction set, selected at run time.
//
// The sources of cpu/isa/ (CMakeLists.txt) are compiled once per instruction set, in a namespace of its name; AMX
// reuses another set's row kernels. Everything they include needs internal linkage or that namespace, or the linker
// might select the AVX-512 copy of a function for a machine without it: use `static inline`, no std containers.
#pragma once

#include "core/drafting.h"
#include "core/kv_cache.h"
#include "core/logprobs.h"
#include "core/options.h"
#include "core/verify/shard_distributions.h"
#include "core/verify/table.h"
#include "cpu/attention_work.h"
#include "cpu/logits_scratch.h"
#include "cpu/recurrent_work.h"

namespace pagedtree::cpu {

// Heads of one token to rotate. Strides count bytes.
struct RotaryHeads {
  const char* from;
  char* to;  // may be `from`
  int64_t from_stride, to_stride;
  int64_t num_heads;
};

struct IsaKernels {
  const char* name;
  void (*attend)(const TreeAttentionParams&, const AttentionRange&);
  void (*merge_pieces)(const TreeAttentionParams&, const AttentionRanges&, int64_t range);
  void (*merge_states)(const MergeStatesParams&, int64_t begin, int64_t end);  // rows token * H + head
  void (*sample)(const SampleParams&, int64_t r, RowScratch& scratch);
  void (*token_logprobs)(const TokenLogprobsParams&, int64_t r, RowScratch& scratch);
  // Computes dst[i] = saturate(src[i] / scale) as e4m3; src is fp32, fp16 or bf16.
  void (*quantize_e4m3)(const void* src, DType dtype, int64_t count, float scale, uint8_t* dst);
  // Rotates by row `angles` of p.cos_sin, and copies the other columns.
  void (*rotate_heads)(const RopeAppendParams& p, int64_t angles, const RotaryHeads& heads);
  // Returns the k best tokens and logits, ties by id; -1 and -inf if fewer are finite. `with_sum`: sums exp(logit -
  // best logit).
  double (*top_tokens)(const LogitRow& row, int32_t k, bool with_sum, int64_t* tokens, float* logits);
  void (*draw_children)(const LogitRow& row, const Sampling& sampling, const ChildrenDraw& draw,
                        FilterScratch& scratch);
  void (*verify_sampled)(const VerifyParams&, int64_t b, RowScratch& scratch);
#define PT_KERNEL_OF_RULE(op, Params, ...) void (*op)(const Params&, int64_t b, RowScratch& scratch);
  PT_EACH_WALK(PT_KERNEL_OF_RULE, PT_KERNEL_OF_RULE)
#undef PT_KERNEL_OF_RULE
  void (*step_shard)(const ShardStepParams&, int64_t row, RowScratch& scratch);
  void (*reduce_shard)(const ShardResidualParams&, int64_t item, RowScratch& scratch);  // a row or a tree
  // Runs item = b * H + h. Without `out` the state advances.
  void (*delta_rule)(const DeltaRuleParams&, int64_t item, DeltaScratch& scratch);
  void (*conv1d)(const ConvParams&, int64_t b, int64_t first_channel);
};

#define PT_ISA(isa)            \
  namespace isa {              \
  const IsaKernels& kernels(); \
  }
PT_ISA(portable)
PT_ISA(avx512_emulated)
PT_ISA(amx_emulated)
PT_ISA(avx2)
PT_ISA(avx512)
PT_ISA(amx)
#undef PT_ISA

// Returns the table named by PAGEDTREE_CPU_ISA (portable, avx2, avx512, amx; in test builds also avx512_emulated,
// amx_emulated; read at each call), else the best. Throws std::runtime_error if machine or build lacks it.
PT_EXPORT const IsaKernels& isa_kernels();

// Returns the supported tables, comma-separated, best last.
PT_EXPORT const char* available_isas();

}  // namespace pagedtree::cpu
