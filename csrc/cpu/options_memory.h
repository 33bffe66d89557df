#pragma once

#include <memory>
#include <vector>

#include "cpu/logits_scratch.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

// Memory of an AdjustedRow, about 16 bytes per column, kept per thread: fetching fresh pages takes longer than a row.
class OptionsMemory {
 public:
  // Allocates only with options.
  static AdjustedRow& of_thread(const OptionsParams& o, int64_t columns) {
    static thread_local OptionsMemory memory;
    if (o.used) memory.grow(static_cast<size_t>(columns), o.cu_bias != nullptr);
    return memory.scratch_;
  }

 private:
  // Fills only new memory: adjust_row() restores the zeros.
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
    scratch_.patched = patched_.data();
    scratch_.columns = columns_.data();
    scratch_.exactness = exactness_.data();
    scratch_.is_kept = is_kept_.data();
    scratch_.masks = masks_.data();
    scratch_.found = found_.data();
    scratch_.most = values_.data();
    scratch_.found_least = values_.data() + blocks;
    scratch_.values = values_.data() + 2 * blocks;
    scratch_.bias = bias_.data();
  }

  AdjustedRow scratch_{};
  std::vector<uint32_t> patched_;
  std::vector<int32_t> columns_;
  std::vector<Exactness> exactness_;
  std::vector<BlockMasks> masks_;
  std::vector<uint64_t> found_;
  std::vector<uint8_t> is_kept_;
  std::vector<float> values_, bias_;
};

// Calls kernel(p, i, scratch) for i below `count`. Rows have `columns` logits.
template <typename Params>
void for_each_row(const ExecContext& ctx, int64_t count, const OptionsParams& o, int64_t columns, const Params& p,
                  void (*kernel)(const Params&, int64_t i, RowScratch& scratch)) {
  parallel_for(ctx, count, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<RowScratch>();
    scratch->adjusted = &OptionsMemory::of_thread(o, columns);
    for (int64_t i = begin; i < end; ++i) kernel(p, i, *scratch);
  });
}

}  // namespace pagedtree::cpu
