// Attention kernels of the instruction set that the including source is compiled for.
#pragma once

#include "cpu/attention_work.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Computes one range: whole row tiles go to the output, pieces to their place in the scratch.
void attend(const TreeAttentionParams& params, const AttentionRange& range);

// Joins the pieces of the row tile that `range` began and did not end, if there is one; with segments, those of KV head
// `range` % Hkv of sequence `range` / Hkv.
void merge_pieces(const TreeAttentionParams& params, const AttentionRanges& ranges, int64_t range);

void merge_states(const MergeStatesParams& params, int64_t begin, int64_t end);

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
