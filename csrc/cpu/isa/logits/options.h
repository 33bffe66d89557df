// Puts a row under request options (core/options.h).
#pragma once

#include "core/options.h"
#include "cpu/isa/logits/adjusted_row.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// A row that reads as the options leave it, as long as the scratch is not given another one.
LogitRow adjust_row(const RowOptions& options, const LogitRow& row, AdjustedRow& scratch);

// The same; the row as it is in memory where there are no options.
static inline LogitRow row_under(const OptionsParams& o, int64_t b, int64_t n, const LogitRow& row,
                                 AdjustedRow& scratch) {
  return o.used ? adjust_row(RowOptions(o, b, n), row, scratch) : row;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
