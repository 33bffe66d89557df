// Owns the memory of an AdjustedRow, of which a thread needs one for all its rows.
#pragma once

#include <memory>

#include "cpu/logits_scratch.h"

namespace pagedtree::cpu {

class OptionsMemory {
 public:
  // For rows of `columns`; nothing is allocated without options.
  OptionsMemory(const OptionsParams& o, int64_t columns) {
    if (!o.used) return;
    const auto size = static_cast<size_t>(columns), words = size / 32 + 1, blocks = size / kPeakBlock + 1;
    patched_ = std::make_unique<uint32_t[]>(words);
    columns_ = std::make_unique_for_overwrite<int32_t[]>(size);
    flags_ = std::make_unique_for_overwrite<uint8_t[]>(blocks);
    values_ = std::make_unique_for_overwrite<float[]>(size + kMostLanes + 2 * blocks);
    if (o.cu_bias != nullptr) bias_ = std::make_unique<float[]>(size);
    scratch.patched = patched_.get();
    scratch.columns = columns_.get();
    scratch.is_exact = flags_.get();
    scratch.most = values_.get();
    scratch.exact_from = values_.get() + blocks;
    scratch.values = values_.get() + 2 * blocks;
    scratch.bias = bias_.get();
  }

  AdjustedRow scratch{};

 private:
  std::unique_ptr<uint32_t[]> patched_;
  std::unique_ptr<int32_t[]> columns_;
  std::unique_ptr<uint8_t[]> flags_;
  std::unique_ptr<float[]> values_, bias_;
};

}  // namespace pagedtree::cpu
