// Attention kernels of one instruction set.
#pragma once

#include "cpu/attention_work.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Computes one range: whole row tiles to the output, pieces to the scratch.
void attend(const TreeAttentionParams& params, const AttentionRange& range);

// Merges the pieces of the row tile that `range` began but did not end, if any; with segments, of KV head `range` % Hkv
// of sequence `range` / Hkv.
void merge_pieces(const TreeAttentionParams& params, const AttentionRanges& ranges, int64_t range);

void merge_states(const MergeStatesParams& params, int64_t begin, int64_t end);

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
