// Memory that the hosts allocate for the kernels of cpu/isa/logits.
#pragma once

#include "core/options.h"
#include "core/verify/rules.h"

namespace pagedtree::cpu {

// A row's peaks: the largest logit of each lane in each block. Later scans skip blocks by them.
constexpr int kPeakBlock = kMassBlock;
constexpr int kMostLanes = 16;
constexpr int kMaxPeaks = kMaxVocab / kPeakBlock * kMostLanes;

// Scratch of the filters' search in a row of any length: its peaks, and logits that are listed.
struct FilterScratch {
  float peaks[kMaxPeaks];
  float listed[kMaxVocab + kMostLanes];
  float left[kMaxVocab + kMostLanes];
};

// What is known of a block's peaks under request options: bounds of them, their largest and bounds of the others, or
// all.
enum class Exactness : uint8_t { kBounds, kMost, kPeaks };
enum class BlockMasks : uint8_t { kUnknown, kAllow, kForbid };
// Words of 64 bits for a block's vectors, of at least four lanes.
constexpr int kMostWords = kPeakBlock / 4 / 64;

// A row under request options, of at most V columns: how its logits are adjusted when they are read.
struct AdjustedRow {
  LogitRow memory;  // the row as it is in memory
  Penalties penalties;
  const int32_t* allowed_mask;  // of the sequence, these three, or null
  const int32_t* prompt_mask;   // null also without a penalty that asks for it
  const int32_t* counts;        // of this row's columns
  int64_t first_token, vocab;
  int64_t num_patched = 0;
  float largest;  // what +inf reads as
  bool pays;      // whether there is a penalty
  bool lowers;    // whether only patches can raise a logit
  // Memory that OptionsMemory owns:
  float* values;         // [V + kMostLanes] adjusted logits of patched tokens, and of blocks that are kept
  Exactness* exactness;  // [blocks]
  BlockMasks* masks;     // [blocks] whether a mask may forbid one of the block's tokens
  float* found_least;    // [blocks] above which logit `found` has the block's vectors; infinite: not known yet
  uint64_t* found;       // [blocks * kMostWords] bits: vectors
  uint8_t* is_kept;      // [blocks] whether `values` holds the block
  float* most;           // [blocks] the largest peak, or bound, of the block
  uint32_t* patched;     // [ceil(V / 32)] bits: tokens that RowPatch has corrected
  int32_t* columns;      // [V] those tokens, num_patched in all
  float* bias;           // [V] zeros, to add biases up in
};

// Scratch of a row; what follows the first two is for rules that weigh drafts.
struct RowScratch {
  FilterScratch filter;
  AdjustedRow* adjusted;  // of the thread
  NodeDistributions distributions;
  MassTable residuals, drafts;
  MassBlock block;
  int32_t tried[kMaxTreeNodes];
  int16_t parents[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];
};

}  // namespace pagedtree::cpu
