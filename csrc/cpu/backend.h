// The CPU backend: rules are in rules.cpp, other ops in their family's file.
#pragma once

#include "core/ops.h"

namespace pagedtree::cpu {

class CpuBackend final : public Backend {
 public:
  constexpr CpuBackend() : Backend("cpu", {.recurrent_float32 = true, .cache_alignment = 1}, 0) {}

  PT_OVERRIDES
};

}  // namespace pagedtree::cpu
