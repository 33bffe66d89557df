// Compiled once per instruction set: its table.
#include "cpu/isa.h"

#define PT_STRING_(x) #x
#define PT_STRING(x) PT_STRING_(x)

namespace pagedtree::cpu::PAGEDTREE_ISA {

const IsaKernels& kernels() {
  static constexpr IsaKernels table = {
      .name = PT_STRING(PAGEDTREE_ISA),
  };
  return table;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
