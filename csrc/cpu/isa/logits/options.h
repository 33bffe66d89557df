// Request options (core/options.h) applied to a row before it is scanned.
#pragma once

#include "core/options.h"
#include "cpu/isa/logits/row.h"
#include "cpu/logits_scratch.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// The row as the options leave it, in the scratch.
LogitRow adjust_row(const RowOptions& options, const LogitRow& row, OptionsScratch& scratch);

// The same; the row as it is in memory where there are no options.
static inline LogitRow row_under(const OptionsParams& o, int64_t b, int64_t n, const LogitRow& row,
                                 OptionsScratch& scratch) {
  return o.used ? adjust_row(RowOptions(o, b, n), row, scratch) : row;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
