#include "core/backend.h"

#include "cpu/backend.h"

namespace pagedtree::cpu {

#define PT_IS_COMPLETE(op, Params, ...) static_assert(sizeof(Params) > 0, "core/backend.h lacks a family's header");
PT_EACH_OP(PT_IS_COMPLETE, PT_IS_COMPLETE)

const Backend& backend() {
  static constexpr CpuBackend only;
  return only;
}

}  // namespace pagedtree::cpu
