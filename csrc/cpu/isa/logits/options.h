#pragma once

#include "core/options.h"
#include "cpu/isa/logits/adjusted_row.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Returns a row that reads as adjusted, valid until the scratch is reused.
LogitRow adjust_row(const RowOptions& options, const LogitRow& row, AdjustedRow& scratch);

// Returns the original row without options.
static inline LogitRow row_under(const OptionsParams& o, int64_t b, int64_t n, const LogitRow& row,
                                 AdjustedRow& scratch) {
  return o.used ? adjust_row(RowOptions(o, b, n), row, scratch) : row;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
