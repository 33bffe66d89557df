// One table of vectorised kernels an instruction set; the choice among them is made at run time.
//
// The sources listed under PAGEDTREE_ISA_SOURCES in CMakeLists.txt are compiled once per instruction set, each time in
// a namespace of that name. Whatever they include must have internal linkage or live in that namespace: a function
// shared through the linker could be the AVX-512 copy on a machine without it. So: `static inline`, no std containers.
#pragma once

#include "core/backend.h"
#include "core/drafting.h"
#include "core/laws.h"
#include "core/shard_laws.h"
#include "cpu/attention/work.h"

namespace pagedtree::cpu {

// A row's peaks: the largest logit of each lane in each block, for later scans to skip the blocks of no use to them.
constexpr int kPeakBlock = kLawBlock;
constexpr int kMostLanes = 16;
constexpr int kMaxPeaks = kMaxVocab / kPeakBlock * kMostLanes;

// Scratch of the filters' search in a row of any length: tables of tokens by one half of their logits' order key.
constexpr int kBins = 1 << 16;
constexpr int kBlockBins = 256;
constexpr int kBlocks = kBins / kBlockBins;
struct RowTotals {
  uint64_t count;
  uint64_t mass;
};
struct FilterScratch {
  float peaks[kMaxPeaks];
  uint32_t high_counts[kBins];
  uint64_t high_masses[kBins];
  uint32_t low_counts[kBins];
  RowTotals high_blocks[kBlocks];
  RowTotals low_blocks[kBlocks];
};

// Scratch of the rules that weigh drafts.
struct LawScratch {
  FilterScratch filter;
  NodeLaws laws;
  LawTable residuals, drafts;
  LawBlock block;
  int32_t tried[kMaxTreeNodes];
  int16_t parents[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];
};

struct IsaKernels {
  const char* name;
  Draw (*draw_token)(const LogitRow& row, const Law& law, uint64_t seed, int64_t position, FilterScratch& scratch);
  // dst[i] = saturate(src[i] / scale) as e4m3; dtype is that of src: fp32, fp16 or bf16.
  void (*quantize_e4m3)(const void* src, DType dtype, int64_t count, float scale, uint8_t* dst);
  // The k best tokens, best first and the lower id first among equals, and their logits; -1 and -inf where fewer are
  // finite. Returns the sum of exp(logit - best logit) if asked to.
  double (*top_tokens)(const LogitRow& row, int32_t k, bool with_sum, int64_t* tokens, float* logits);
  void (*draw_children)(const LogitRow& row, const Law& law, const ChildrenDraw& draw, FilterScratch& scratch);
  void (*verify_rejection)(const RatioParams&, int64_t b, LawScratch& scratch);
  void (*verify_block)(const RatioParams&, int64_t b, LawScratch& scratch);
  void (*verify_typical)(const RatioParams&, int64_t b, LawScratch& scratch);
  void (*verify_traversal)(const RatioParams&, int64_t b, LawScratch& scratch);
  void (*step_shard)(const ShardStepParams&, int64_t row);
  void (*weigh_shard)(const ShardWeighParams&, int64_t item, LawScratch& scratch);  // a row, or a tree
  void (*attend)(const TreeAttentionParams&, const AttentionRange&);
  void (*merge_pieces)(const TreeAttentionParams&, const AttentionRanges&, int32_t range);
  void (*merge_states)(const MergeStatesParams&, int64_t begin, int64_t end);  // rows token * H + head
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

// The best table this machine can run, or the one PAGEDTREE_CPU_ISA names (portable, avx2, avx512, amx, in test builds
// avx512_emulated and amx_emulated; read at each call). Throws std::runtime_error where the machine or the build lacks
// the named one.
PT_EXPORT const IsaKernels& isa_kernels();

// Comma-separated names of those this machine can run, best last.
PT_EXPORT const char* available_isas();

}  // namespace pagedtree::cpu
