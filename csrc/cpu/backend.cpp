#include "cpu/backend.h"

namespace pagedtree::cpu {

const Backend& backend() {
  static constexpr CpuBackend only;
  return only;
}

}  // namespace pagedtree::cpu
