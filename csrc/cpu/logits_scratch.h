// Memory for cpu/isa/logits.
#pragma once

#include "core/options.h"
#include "core/verify/rules.h"

namespace pagedtree::cpu {

// Peaks: largest logit per block and lane.
constexpr int kPeakBlock = kMassBlock;
constexpr int kMostLanes = 16;
constexpr int kMaxPeaks = kMaxVocab / kPeakBlock * kMostLanes;

struct FilterScratch {
  float peaks[kMaxPeaks];
  float listed[kMaxVocab + kMostLanes];
  float left[kMaxVocab + kMostLanes];
};

// Exactness of a block's peaks: bounds; exact maximum and bounds; all exact.
enum class Exactness : uint8_t { kBounds, kMost, kPeaks };
enum class BlockMasks : uint8_t { kUnknown, kAllow, kForbid };
// One bit per vector of a block, of at least four lanes.
constexpr int kMostWords = kPeakBlock / 4 / 64;

// A row of at most V columns under request options, adjusted on reading.
struct AdjustedRow {
  LogitRow memory;
  Penalties penalties;
  const int32_t* allowed_mask;  // of the sequence, like the next two; or null
  const int32_t* prompt_mask;   // null also if no penalty uses it
  const int32_t* counts;        // of this row's columns
  int64_t first_token, vocab;
  int64_t num_patched = 0;
  float largest;  // replaces +inf
  bool pays;      // true if there is a penalty
  bool lowers;    // true if only patches can raise a logit
  // Owned by OptionsMemory:
  float* values;         // [V + kMostLanes] adjusted logits of patched tokens and kept blocks
  Exactness* exactness;  // [blocks]
  BlockMasks* masks;     // [blocks]
  float* found_least;    // [blocks] bound of `found`; infinite: unknown
  uint64_t* found;       // [blocks * kMostWords] vectors with a logit above it
  uint8_t* is_kept;      // [blocks] nonzero if in `values`
  float* most;           // [blocks] largest peak or bound
  uint32_t* patched;     // [ceil(V / 32)] tokens corrected by RowPatch
  int32_t* columns;      // [num_patched] these tokens
  float* bias;           // [V] zeros between rows
};

// From `distributions` on for rules with drafts.
struct RowScratch {
  FilterScratch filter;
  AdjustedRow* adjusted;  // the thread's
  NodeDistributions distributions;
  MassTable residuals, drafts;
  MassBlock block;
  int32_t tried[kMaxTreeNodes];
  int16_t parents[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];
};

}  // namespace pagedtree::cpu
