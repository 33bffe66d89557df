// Owns an OptionsScratch, of which a thread needs one for all its rows.
#pragma once

#include <memory>

#include "cpu/logits_scratch.h"

namespace pagedtree::cpu {

class OptionsMemory {
 public:
  // For rows of `columns`; nothing is allocated without options.
  OptionsMemory(const OptionsParams& o, int64_t columns) {
    if (o.used) row_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(columns + kMostLanes));
    if (o.cu_bias != nullptr) bias_ = std::make_unique<float[]>(static_cast<size_t>(columns));
    scratch = {row_.get(), bias_.get()};
  }

  OptionsScratch scratch;

 private:
  std::unique_ptr<float[]> row_, bias_;
};

}  // namespace pagedtree::cpu
