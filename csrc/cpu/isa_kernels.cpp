// Compiled once per instruction set: its table.
#include "cpu/isa.h"

#define PT_STRING_(x) #x
#define PT_STRING(x) PT_STRING_(x)

namespace pagedtree::cpu::PAGEDTREE_ISA {

Draw draw_token(const LogitRow& row, const Law& law, uint64_t seed, int64_t position);

const IsaKernels& kernels() {
  static constexpr IsaKernels table = {
      .name = PT_STRING(PAGEDTREE_ISA),
      .draw_token = draw_token,
  };
  return table;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
