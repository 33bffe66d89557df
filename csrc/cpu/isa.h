// One table of vectorised kernels for each instruction set; the choice among them is made at run time.
//
// The sources of cpu/isa/, listed in CMakeLists.txt, are compiled once per instruction set, each time in a namespace of
// that name; those over rows not again for AMX, which has nothing for them. Whatever they include must have internal
// linkage or live in that namespace: a function shared through the linker could be the AVX-512 copy on a machine
// without it. So: `static inline`, no std containers.
#pragma once

#include "core/drafting.h"
#include "core/kv_cache.h"
#include "core/logprobs.h"
#include "core/options.h"
#include "core/shard_distributions.h"
#include "cpu/attention_work.h"
#include "cpu/logits_scratch.h"
#include "cpu/recurrent_work.h"

namespace pagedtree::cpu {

// The heads of one token whose columns are rotated. Strides count bytes.
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
  // dst[i] = saturate(src[i] / scale) as e4m3; dtype is that of src: fp32, fp16 or bf16.
  void (*quantize_e4m3)(const void* src, DType dtype, int64_t count, float scale, uint8_t* dst);
  // Rotates the heads by row `angles` of p.cos_sin, and copies their other columns.
  void (*rotate_heads)(const RopeAppendParams& p, int64_t angles, const RotaryHeads& heads);
  // The k best tokens and their logits, best first, equal ones by id; -1 and -inf where fewer are finite. Returns the
  // sum of exp(logit - best logit) if asked to.
  double (*top_tokens)(const LogitRow& row, int32_t k, bool with_sum, int64_t* tokens, float* logits);
  void (*draw_children)(const LogitRow& row, const Sampling& sampling, const ChildrenDraw& draw,
                        FilterScratch& scratch);
  void (*verify_sampled)(const VerifyParams&, int64_t b, RowScratch& scratch);
  void (*verify_rejection)(const RatioParams&, int64_t b, RowScratch& scratch);
  void (*verify_block)(const RatioParams&, int64_t b, RowScratch& scratch);
  void (*verify_typical)(const RatioParams&, int64_t b, RowScratch& scratch);
  void (*verify_traversal)(const RatioParams&, int64_t b, RowScratch& scratch);
  void (*step_shard)(const ShardStepParams&, int64_t row, RowScratch& scratch);
  void (*weigh_shard)(const ShardWeighParams&, int64_t item, RowScratch& scratch);  // a row, or a tree
  // A value head of a sequence: item = b * H + h. Without `out` the state advances.
  void (*delta_rule)(const DeltaRuleParams&, int64_t item, DeltaScratch& scratch);
  void (*conv1d)(const ConvParams&, int64_t b, int64_t first_channel);
};

namespace portable {
const IsaKernels& kernels();
}
#if defined(PAGEDTREE_HAS_AVX512_EMULATED)
namespace avx512_emulated {
const IsaKernels& kernels();
}
#endif
#if defined(PAGEDTREE_HAS_AMX_EMULATED)
namespace amx_emulated {
const IsaKernels& kernels();
}
#endif
#if defined(PAGEDTREE_X86)
namespace avx2 {
const IsaKernels& kernels();
}
namespace avx512 {
const IsaKernels& kernels();
}
namespace amx {
const IsaKernels& kernels();
}
#endif

// The best table that this machine can run, or the one that PAGEDTREE_CPU_ISA names (portable, avx2, avx512, amx; in
// test builds also avx512_emulated and amx_emulated; read at each call). Throws std::runtime_error if the machine or
// the build lacks the named one.
PT_EXPORT const IsaKernels& isa_kernels();

// The names of the tables that this machine can run, separated by commas, best last.
PT_EXPORT const char* available_isas();

}  // namespace pagedtree::cpu
