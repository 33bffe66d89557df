// The memory of an AdjustedRow, of which a thread needs one for all its rows.
#pragma once

#include <vector>

#include "cpu/logits_scratch.h"

namespace pagedtree::cpu {

// It stays with the thread from call to call, some 16 bytes per column: fetching fresh pages takes longer than a row.
class OptionsMemory {
 public:
  // For rows of `columns`; nothing is allocated without options.
  OptionsMemory(const OptionsParams& o, int64_t columns) : scratch(of_thread().scratch) {
    if (o.used) of_thread().grow(static_cast<size_t>(columns), o.cu_bias != nullptr);
  }

  AdjustedRow& scratch;

 private:
  struct Buffers {
    AdjustedRow scratch{};
    std::vector<uint32_t> patched_;
    std::vector<int32_t> columns_;
    std::vector<Exactness> exactness_;
    std::vector<BlockMasks> masks_;
    std::vector<uint64_t> found_;
    std::vector<uint8_t> is_kept_;
    std::vector<float> values_, bias_;

    // adjust_row() leaves zeros where it finds them, so that only new memory is filled.
    void grow(size_t size, bool has_bias) {
      const size_t blocks = columns_.size() < size ? size / kPeakBlock + 1 : is_kept_.size();
      if (columns_.size() < size) {
        patched_.resize(size / 32 + 1);
        columns_.resize(size);
        exactness_.resize(blocks);
        masks_.resize(blocks);
        found_.resize(blocks * kMostWords);
        is_kept_.resize(blocks);
        values_.resize(size + kMostLanes + 2 * blocks);
      }
      if (has_bias && bias_.size() < size) bias_.resize(size);
      scratch.patched = patched_.data();
      scratch.columns = columns_.data();
      scratch.exactness = exactness_.data();
      scratch.is_kept = is_kept_.data();
      scratch.masks = masks_.data();
      scratch.found = found_.data();
      scratch.most = values_.data();
      scratch.found_least = values_.data() + blocks;
      scratch.values = values_.data() + 2 * blocks;
      scratch.bias = bias_.data();
    }
  };

  static Buffers& of_thread() {
    static thread_local Buffers buffers;
    return buffers;
  }
};

}  // namespace pagedtree::cpu
