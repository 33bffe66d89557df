// Memory that the hosts allocate for the kernels of cpu/isa/logits.
#pragma once

#include "core/verify/rules.h"

namespace pagedtree::cpu {

// A row's peaks: the largest logit of each lane in each block. Later scans skip blocks by them.
constexpr int kPeakBlock = kMassBlock;
constexpr int kMostLanes = 16;
constexpr int kMaxPeaks = kMaxVocab / kPeakBlock * kMostLanes;

// Scratch of the filters' search in a row of any length: tables of tokens by one half of the order key of their logits.
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

// Where a row is written anew under request options: [V + kMostLanes] logits, and [V] zeros to add biases up in.
struct OptionsScratch {
  float* row;
  float* bias;
};

// Scratch of the rules that weigh drafts.
struct RulesScratch {
  FilterScratch filter;
  OptionsScratch options;
  NodeDistributions distributions;
  MassTable residuals, drafts;
  MassBlock block;
  int32_t tried[kMaxTreeNodes];
  int16_t parents[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];
};

}  // namespace pagedtree::cpu
